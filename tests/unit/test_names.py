"""Names of the notebook in the line of a magic."""

from __future__ import annotations

import pytest

from nbddp.errors import ConfigError
from nbddp.kernel.names import evaluate, expand

NAMES = {"lr0": 0.001, "n": 2, "cfg": {"lr": 0.5}, "opts": "--lr 1 --fused", "net": object(), "_hidden": 1}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--lr {lr0} -n {n}", "--lr 0.001 -n 2"),
        ("--lr {lr0 * n:.4f}", "--lr 0.0020"),
        ("--lr {cfg['lr']}", "--lr 0.5"),
        ("--lr $lr0 -n $n", "--lr 0.001 -n 2"),
        ("net data {opts}", "net data --lr 1 --fused"),
        ("--note {{n}} {{ {n}", "--note {n} {{ {n}"),
        ("--note 'costs $5, $unknown'", "--note 'costs $5, $unknown'"),
        ("--norm {'encoder': 'sync'}", "--norm {'encoder': 'sync'}"),
        ("{k: v for k, v in pairs}", "{k: v for k, v in pairs}"),
        ("{} {1, 2}", "{} {1, 2}"),
        ("{lr0", "{lr0"),
    ],
)
def test_values_take_the_place_of_expressions(line, expected):
    assert expand(line, NAMES) == expected


def test_an_expression_that_fails_is_named():
    with pytest.raises(ConfigError, match=r"^\{lr1\}: lr1 is not defined in the notebook. Did you mean lr0\?$"):
        expand("--lr {lr1}", NAMES)
    with pytest.raises(ConfigError, match=r"^\{cfg\['rl'\]\}: KeyError: 'rl'$"):
        expand("--lr {cfg['rl']}", NAMES)


def test_an_expression_is_evaluated_and_leaves_nothing():
    names = dict(NAMES)
    named = evaluate("(x := cfg)['lr'] + n", names, what="MODEL")
    assert (named.name, named.value) == ("(x := cfg)['lr'] + n", 2.5)
    assert names == NAMES


def test_a_lambda_knows_its_line():
    value = evaluate(" lambda o, t: o ", NAMES, what="--loss", filename="cell", line=3).value
    assert (value.__code__.co_filename, value.__code__.co_firstlineno) == ("cell", 3)


@pytest.mark.parametrize(
    "text, said",
    [
        ("nett", "nett is not defined in the notebook. Did you mean net?"),
        ("nett.a", "MODEL nett.a: nett is not defined in the notebook. Did you mean net?"),
        ("hidden", "hidden is not defined in the notebook."),
        ("a b", "MODEL a b: not a name or an expression (invalid syntax)"),
        ("model=net", "MODEL model=net: not a name or an expression"),
        ("", "MODEL : not a name or an expression"),
        ("cfg['x']", "MODEL cfg['x']: KeyError: 'x'"),
        ("1 / 0", "MODEL 1 / 0: ZeroDivisionError: division by zero"),
    ],
)
def test_what_stands_for_no_object_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        evaluate(text, NAMES, what="MODEL")
    assert said in str(caught.value)
