"""Damage to the files of a run directory, of every kind that a full disk, another hand or another version leaves.

Seeded: the same number damages the same files in the same way.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, -(10**400), 1.5, float("nan"), float("inf"), 1e308, -1e308),
    *("", "x", "nan", "1e999", "\x1b[2J\u202e", "x" * 5000, "../../etc", "/dev/zero", "\ud800"),
    *([], [1], ["x"], [None], [[]], {}, {"x": "y"}, {"step": 1}, [1] * 1000, {"": {}}),
)
"""Values as JSON may hold them, where something else should be."""
NO_OBJECT = (b"", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\x00", b"[" * 200_000, b'{"a":' * 100_000, b"NaN", b'{"config":{}}', b'{"state":"finished"}')
NO_ARCHIVE = (b"", b"junk", b"\x80\x02.", b"PK\x03\x04")


def damage(run: Path, dice: random.Random) -> list[str]:
    """Damage one to three files of a run; return their names, for messages."""
    said = []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
        small = [path for path in files if path.suffix == ".json"]
        if not files:
            break
        path = dice.choice(small if small and dice.random() < 0.35 else files)
        said.append(f"{path.relative_to(run)}: {_damage(path, run, dice)}")
    return said


def _damage(path: Path, run: Path, dice: random.Random) -> str:
    folder = path.parent
    what = dice.choices(("content", "gone", "folder", "dangling", "pipe", "endless", "folder gone", "folder a file"), (82, 5, 2, 2, 2, 2, 3, 2))[0]
    if what == "content":
        {".json": _json, ".jsonl": _lines, ".pt": _archive}.get(path.suffix, _text)(path, dice)
    elif what == "folder gone" and folder != run:
        shutil.rmtree(folder)
    elif what == "folder a file" and folder != run:
        shutil.rmtree(folder)
        folder.write_text("x")
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what in ("dangling", "endless"):
            path.symlink_to("/nonexistent" if what == "dangling" else "/dev/zero")
    return what


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*place, key))


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with something else in one place, or with a field that is gone or is called otherwise."""
    place = dice.choice(list(_places(value)))
    if not place:
        return copy.deepcopy(dice.choice(ODD))
    holder, key = value, place[-1]
    for step in place[:-1]:
        holder = holder[step]
    luck = dice.random()
    if luck < 0.7 or not isinstance(holder, dict):
        holder[key] = copy.deepcopy(dice.choice(ODD))
    else:
        kept = holder.pop(key)
        if luck > 0.85:
            holder[dice.choice(("zz", "loss", "", "\u202e", "step"))] = kept
    return value


def _changed(data: bytes, dice: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        value = mutated(value, dice)
    return json.dumps(value).encode()


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _json(path: Path, dice: random.Random) -> None:
    luck, data = dice.random(), path.read_bytes()
    try:
        path.write_bytes(_changed(data, dice) if luck < 0.6 else _cut(data, dice) if luck < 0.7 else dice.choice(NO_OBJECT))
    except (ValueError, RecursionError):  # damaged already
        path.write_bytes(dice.choice(NO_OBJECT))


def _lines(path: Path, dice: random.Random) -> None:
    luck, data = dice.random(), path.read_bytes()
    lines = data.split(b"\n")
    if luck < 0.8:
        for index in dice.sample(range(len(lines)), min(len(lines), dice.choice((1, 1, 3, len(lines))))):
            try:
                good = dice.random() < 0.8 and lines[index]
                lines[index] = _changed(lines[index], dice) if good else dice.choice((*NO_OBJECT[:7], _cut(lines[index], dice), b"[" * 100_000))
            except (ValueError, RecursionError):
                continue
        path.write_bytes(b"\n".join(lines))
    else:
        path.write_bytes(dice.choice((_cut(data, dice), b"", b"\n" * 10, b"\x00" * 1000, b"\n".join(reversed(lines)), b"\n".join(lines * 2))))


def _archive(path: Path, dice: random.Random) -> None:
    import torch

    luck, data = dice.random(), path.read_bytes()
    if luck < 0.3:
        path.write_bytes(_cut(data, dice))
    elif luck < 0.5:
        path.write_bytes(dice.choice(NO_ARCHIVE))
    elif luck < 0.7:
        at = dice.randrange(len(data) or 1)
        path.write_bytes(data[:at] + dice.randbytes(20) + data[at + 20 :])
    elif luck < 0.8:
        torch.save(dice.choice(([1, 2], {"a": 1}, None, {"model": {}}, torch.ones(2), {"format": 1, "version": 1})), path)
    else:
        try:
            content = torch.load(path, weights_only=True)
        except Exception:  # noqa: BLE001 - damaged already
            content = {"a": 1}
        if isinstance(content, dict):
            content[dice.choice(list(content))] = dice.choice((None, 1, -1, "x", [], {}, 1.5, torch.ones(3)))
        torch.save(content, path)


def _text(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.choice((b"", dice.randbytes(3000), b"\x1b[2J\x1b]0;x\x07" * 100, b"x" * 10**6, b"\n" * 10_000)))
