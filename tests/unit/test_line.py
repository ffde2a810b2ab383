"""The line of a magic: words, options, values, and what is said about everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbddp.config import SYNONYMS, TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.line import parse, scan, split, uncommented
from nbddp.kernel.options import RUNS_OPTIONS, train_options


def words(line):
    return [word.text for word in scan(line).words]


def options(line):
    return dict(parse(f"net data {line}").options)


def refused(line):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    return str(caught.value)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("net  data\t--lr 1", ["net", "data", "--lr", "1"]),
        ("'a b' \"c d\"", ["a b", "c d"]),
        ("--note='a b' --note=\"it's\"", ["--note=a b", "--note=it's"]),
        (r'"say \"hi\"" "C:\temp"', ['say "hi"', r"C:\temp"]),
        ("data['train set'] f(x, [1, 2], {'a': 1})", ["data['train set']", "f(x, [1, 2], {'a': 1})"]),
        ("f(')') g(\"[\", 'it\\'s')", ["f(')')", "g(\"[\", 'it\\'s')"]),
        ("it's fine", ["it's", "fine"]),
        ("net # data", ["net"]),
        ("net#1 data", ["net#1", "data"]),
        ("'#1' # two", ["#1"]),
        ("''", [""]),
        ("", []),
        ("  # all of it", []),
    ],
)
def test_words(line, expected):
    assert words(line) == expected


@pytest.mark.parametrize("line, missing", [("net 'da ta", "'"), ('net --note="a', '"'), ("net f(x", ")"), ("net d[(1, 2)", "]"), ("net f('a)", "'")])
def test_what_is_not_closed_is_named(line, missing):
    assert f"the closing {missing} is missing" in refused(line)


def test_a_quote_ends_its_word():
    assert "put a space after the quote" in refused("'a'b data")


def test_a_comment_is_cut_off_but_not_inside_quotes():
    assert uncommented("net data --note '# 3' # {todo}") == "net data --note '# 3' "


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--batch-size 256", {"batch_size": "256"}),
        ("--batch-size=256", {"batch_size": "256"}),
        ("--batch_size 256", {"batch_size": "256"}),
        ("-n 2", {"nproc": "2"}),
        ("-n2", {"nproc": "2"}),
        ("-n=2", {"nproc": "2"}),
        ("--fused", {"fused": True}),
        ("--fused --lr 1", {"fused": True, "lr": "1"}),
        ("--fused=yes", {"fused": "yes"}),
        ("--no-shuffle", {"shuffle": False}),
        ("--drop-last false", {"drop_last": "false"}),
        ("--shuffle=true", {"shuffle": "true"}),
        ("--pin-memory auto", {"pin_memory": "auto"}),
        ("--lr -1", {"lr": "-1"}),
        ("--lr=-.5", {"lr": "-.5"}),
        ("--val-every 500 steps", {"val_every": "500 steps"}),
        ("--val-every '500 steps'", {"val_every": "500 steps"}),
        ("--val-every 2 --lr 1", {"val_every": "2", "lr": "1"}),
        ("--checkpoint-every 10 min", {"checkpoint_every": "10 min"}),
        ("--max-time 90 s", {"max_time": "90 s"}),
        ("--no-load", {"load": "none"}),
        ("--load best", {"load": "best"}),
        ("--norm sync", {"norm": "sync"}),
        ("--norm 'encoder.*=sync, head=keep'", {"norm": {"encoder.*": "sync", "head": "keep"}}),
        ("--norm {'encoder.*': 'sync'}", {"norm": {"encoder.*": "sync"}}),
    ],
)
def test_options(line, expected):
    assert options(line) == expected


def test_words_and_options_come_in_any_order():
    found = parse("--fused net --epochs 3 train_set -n 2")
    assert (found.model, found.data, dict(found.options)) == ("net", "train_set", {"fused": True, "epochs": "3", "nproc": "2"})


def test_options_of_the_call():
    found = parse("net data --val val_set --loss 'lambda o, t: o' --config ~/a.yaml --as first --background --dry-run --note 'a remark'")
    assert (found.val, found.loss, found.bind, found.note) == ("val_set", "lambda o, t: o", "first", "a remark")
    assert found.config == Path("~/a.yaml").expanduser()
    assert (found.background, found.dry_run, dict(found.options)) == (True, True, {})
    plain = parse("net data --background false")
    assert (plain.val, plain.config, plain.bind, plain.background, plain.dry_run) == (None, None, None, False, False)


def test_expressions_may_stand_for_model_and_data():
    found = parse("nets['a'] Subset(data, range(10)) --val \"sets['val']\"")
    assert (found.model, found.data, found.val) == ("nets['a']", "Subset(data, range(10))", "sets['val']")


@pytest.mark.parametrize("other, ours", SYNONYMS.items())
def test_every_synonym_is_taken_and_named(other, ours):
    value = "true" if train_options()[ours].flag else "1"
    found = parse(f"net data --{other.replace('_', '-')} {value}")
    assert dict(found.options) == {ours: value}
    expected = {} if other == "n" else {f"--{other.replace('_', '-')}": train_options()[ours].spelling}
    assert dict(found.synonyms) == expected


def test_the_short_form_is_no_synonym():
    assert dict(parse("net data -n 2").synonyms) == {}


@pytest.mark.parametrize("name", list(TrainConfig.model_fields))
def test_every_field_is_an_option(name):
    option = train_options()[name]
    value = "false" if option.flag else "1"
    assert options(f"{option.spelling}={value}") == {name: value}
    assert option.help
    assert option.group


def test_help_is_asked_for_before_anything_else_is_checked():
    assert parse("-h") is None
    assert parse("net --help") is None


@pytest.mark.parametrize(
    "line, said",
    [
        ("net data --batchsize 3", "--batchsize is not an option of %%ddp_train. Did you mean --batch-size"),
        ("net data --Epochs 3", "Did you mean --epochs"),
        ("net data -batch-size 3", "Did you mean --batch-size"),
        ("net data --xyzzy 3", "%%ddp_train -h lists the options"),
        ("net data -- 3", "-- is not an option"),
        ("net data --no-lr", "--no-lr is not an option"),
        ("net --data train", "MODEL and DATA stand without a flag: %%ddp_train MODEL DATA"),
        ("net data --val-data v", "Did you mean --val?"),
        ("net data --lr", "--lr needs a value (X): learning rate"),
        ("net data --lr --fused", "--lr needs a value"),
        ("net data --lr=", "--lr needs a value"),
        ("net data --lr 1 --lr 2", "--lr is given twice: keep one"),
        ("net data --lr 1 --learning-rate 2", "--lr and --learning-rate are the same option: keep one"),
        ("net data --load best --no-load", "--load and --no-load are the same option: keep one"),
        ("net data --no-shuffle=true", "--no-shuffle takes no value: write --no-shuffle, or --shuffle=true"),
        ("net data --background=maybe", "--background=maybe: write --background alone, or true or false after it"),
        ("", "model and training data are missing: %%ddp_train MODEL DATA [options]"),
        ("net", "net is the model; the training data is missing"),
        ("net data more words", "more words: net is the model and data the data already"),
        ("net data --note two words", "words: net is the model"),
        ("net, data", "net,: names are separated by a space, without a comma"),
        ("net data \u2013epochs 3", "\u2013epochs begins with a dash that is no hyphen: write --epochs"),
        ("net data --as 3x", "--as 3x: not a name that a variable can have"),
        ("net data --as class", "--as class: not a name that a variable can have"),
        ("net data --norm {encoder:", "the closing } is missing"),
        ("net data --norm {encoder}", "norm={encoder}: not a dict of quoted names"),
        ("net data --norm a=sync,b", "every part must be pattern=value"),
        ("net data --norm a=sync,b=keep,a=layer", "a stands there twice: keep one"),
    ],
)
def test_refusals_name_rule_and_remedy(line, said):
    assert said in refused(line)


def test_magics_name_themselves():
    with pytest.raises(ConfigError, match=r"--lr is not an option of %ddp_runs\. %ddp_runs -h lists the options"):
        split("--lr 1", RUNS_OPTIONS, "%ddp_runs")
    with pytest.raises(ConfigError, match=r"^model and training data are missing: %ddp_plan MODEL DATA"):
        parse("", "%ddp_plan")
