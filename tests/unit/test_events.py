from __future__ import annotations

import json
import math
import stat
import threading
from typing import TYPE_CHECKING

from nbddp.events import EventReader, EventWriter, dumps

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_written_is_read_once_in_order(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.poll() == []
    writer = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    writer.emit("started", device="cpu")
    writer.emit("of another version", step=[1, 2], loss=[0.5, float("nan")])
    first, second = reader.poll()
    assert (first.kind, first.seq, first.rank, first.data) == ("started", 0, 0, {"device": "cpu"})
    assert second.seq == 1
    assert second.data["loss"][0] == 0.5
    assert math.isnan(float(second.data["loss"][1]))
    assert second.mono >= first.mono
    assert reader.poll() == []
    writer.close()
    writer.emit("late")
    assert reader.poll() == []


def test_lines_are_strict_json_that_others_can_read(tmp_path: Path) -> None:
    line = dumps({"a": [float("inf"), {"b": float("-inf")}], "text": "zwölf\n\u2028", "c": (1, float("nan"))})
    assert "\n" not in line
    assert json.loads(line, parse_constant=lambda word: 1 / 0) == {"a": ["inf", {"b": "-inf"}], "text": "zwölf\n\u2028", "c": [1, "nan"]}


def test_a_line_in_the_making_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.0.jsonl"
    writer = EventWriter(path, run="r", rank=0)
    writer.emit("one")
    whole = path.read_bytes()
    second = whole.replace(b'"one"', b'"two"')
    reader = EventReader(tmp_path)
    with path.open("ab") as file:
        file.write(second[:20])
    assert [event.kind for event in reader.poll()] == ["one"]
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(second[20:])
    assert [event.kind for event in reader.poll()] == ["two"]
    writer.close()


def test_damaged_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.0.jsonl"
    writer = EventWriter(path, run="r", rank=0)
    writer.emit("before")
    with path.open("ab") as file:
        file.write(b'{"v":1}\nnot json\n\xff\xfe\n[1,2]\n\n"text"\n')
    writer.emit("after")
    writer.close()
    assert [event.kind for event in EventReader(tmp_path).poll()] == ["before", "after"]


def test_a_backlog_comes_in_parts_and_a_line_longer_than_a_part_comes_whole(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    for index in range(100):
        writer.emit("small", index=index)
    writer.emit("large", text="x" * 50_000)
    writer.emit("last")
    writer.close()
    reader = EventReader(tmp_path)
    parts = []
    while part := reader.poll(limit=1000):
        parts.append(part)
    assert len(parts) > 5
    assert [event.kind for part in parts for event in part] == ["small"] * 100 + ["large", "last"]


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    record = {"v": 2, "run": "r", "rank": 0, "seq": 0, "time": 1.0, "mono": 1.0, "kind": "new", "data": {}, "host": "h"}
    (tmp_path / "rank-00000.0.jsonl").write_text(json.dumps(record) + "\n")
    (event,) = EventReader(tmp_path).poll()
    assert (event.kind, event.attempt) == ("new", 0)


def test_a_folder_that_disappears_ends_the_reading_quietly(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    writer = EventWriter(folder / "rank-00000.0.jsonl", run="r", rank=0)
    writer.emit("one")
    reader = EventReader(folder)
    assert len(reader.poll()) == 1
    writer.emit("two")
    (folder / "rank-00000.0.jsonl").unlink()
    folder.rmdir()
    assert reader.poll() == []
    writer.close()


def test_threads_number_their_events_without_gaps(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)

    def write() -> None:
        for _ in range(500):
            writer.emit("heartbeat", text="y" * 200)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert [event.seq for event in EventReader(tmp_path).poll()] == list(range(2000))


def test_event_files_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.0.jsonl"
    EventWriter(path, run="r", rank=0).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
