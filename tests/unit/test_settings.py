"""The settings file of --config."""

from __future__ import annotations

import pytest

from nbddp.errors import ConfigError
from nbddp.kernel.settings import settings


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_keys_are_options_and_synonyms(file):
    config = settings(file("batch_size: 64\nlearning_rate: 1e-3\nshuffle: off\nval_every: 500 steps\n"))
    assert config.given == {"batch_size", "lr", "shuffle", "val_every"}
    assert (config.batch_size, config.lr, config.shuffle, config.val_every) == (64, 0.001, False, "500 steps")


@pytest.mark.parametrize(
    "text, said",
    [
        ("batchsize: 64\n", "batchsize is not an option. Did you mean batch_size"),
        ("batch_size: many\n", "batch_size='many' must be a valid integer"),
        ("lr: 1\nepochs: 2\nlr: 2\n", "line 3: the key lr is given twice"),
        ("a: [1\n", "line 2: "),
        ("- lr\n", "must be a mapping"),
        ("1: 2\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("lr: \x00\n", "special characters are not allowed"),
        ("!!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("training: {stage_0: {epochs: 1}}\n", "settings files of other systems are not available yet"),
    ],
)
def test_refusals_name_the_file(file, text, said):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        settings(path)
    assert str(caught.value).startswith(f"--config {path}")
    assert said in str(caught.value)


def test_a_missing_file_is_named_with_its_neighbour(file):
    path = file("lr: 1\n").with_name("setting.yaml")
    with pytest.raises(ConfigError, match=r"there is no such file. Did you mean settings.yaml\?"):
        settings(path)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "net.pt").write_bytes(b"\x80\x81\xff")
    with pytest.raises(ConfigError, match="can't be read"):
        settings(tmp_path / "net.pt")
    with pytest.raises(ConfigError, match="can't be read"):
        settings(tmp_path)
