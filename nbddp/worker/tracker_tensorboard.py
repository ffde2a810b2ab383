"""Values to TensorBoard. Runs in the process of the tracker, see `nbddp.worker.tracker`; needs the package tensorboard, not torch's wrapper of it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbddp.worker.tracker import End, Start


class TensorBoard:
    """One event file, in a folder named after the run: scalars by step, the configuration as hyperparameters and as a text, how the run ended."""

    def __init__(self, start: Start) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
        from tensorboard.plugins.hparams import metadata as hparams
        from tensorboard.plugins.text import metadata as text
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        self._api, self._data, self._hparams, self._text_plugin = api_pb2, plugin_data_pb2, hparams, text
        folder = start.config.tensorboard
        assert folder is not None, "started for a run with the option"
        self._writer = EventFileWriter(str(folder.expanduser() / start.run.id), max_queue_size=1000)
        self._step = 0
        facts = start.facts()
        self._hyperparameters(facts)
        self._text("run", "\n".join(f"    {name}: {json.dumps(value)}" for name, value in facts.items() if value is not None))  # indented: set as written

    def log(self, step: int, time_s: float, values: dict[str, float]) -> None:
        self._step = step
        scalars = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(*scalars, time_s=time_s)

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, end: End) -> None:
        status = self._api.STATUS_FAILURE if end.exit_code else self._api.STATUS_SUCCESS
        self._session(self._hparams.SESSION_END_INFO_TAG, session_end_info=self._data.SessionEndInfo(status=status, end_time_secs=time.time()))
        self._text("end", f"{end.state}{': ' if end.reason else ''}{end.reason}")
        self._writer.close()

    def _hyperparameters(self, facts: dict[str, Any]) -> None:
        """The configuration as hyperparameters, of which TensorBoard makes a table over runs."""
        info = self._data.SessionStartInfo(group_name=facts["run"], start_time_secs=time.time())
        for name, value in facts.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                info.hparams[name].number_value = value
            elif value is not None:
                info.hparams[name].string_value = value if isinstance(value, str) else json.dumps(value)
        self._session(self._hparams.SESSION_START_INFO_TAG, session_start_info=info)

    def _session(self, tag: str, **content: Any) -> None:
        about = self._hparams.create_summary_metadata(self._data.HParamsPluginData(**content))
        self._add(self._summary.Summary.Value(tag=tag, metadata=about, tensor=self._hparams.NULL_TENSOR))

    def _text(self, tag: str, text: str) -> None:
        about = self._text_plugin.create_summary_metadata(display_name=tag, description="")
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        self._add(self._summary.Summary.Value(tag=tag, metadata=about, tensor=tensor))

    def _add(self, *values: Any, time_s: float | None = None) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time() if time_s is None else time_s, step=self._step, summary=summary))
