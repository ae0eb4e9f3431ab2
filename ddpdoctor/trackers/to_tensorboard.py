"""Writes event files for TensorBoard: one run per rank, so that a chart shows all ranks.

Records are written with TensorBoard's own package; torch is not needed. File names do not contain the host. A second export of a
recording replaces the first. A different recording of the same name gets its own folder, because TensorBoard shows all files of a
folder as one run.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ddpdoctor.trackers import missing_package
from ddpdoctor.trackers.contents import Curve, TrackerRun
from ddpdoctor.written import EVENTS, write_file

_FILE_PATTERN = "events.out.tfevents.*.ddpdoctor-*"
_FILE_NAME = "events.out.tfevents.{second:010d}.ddpdoctor-{recording}"
_VERSION = "brain.Event:2"


def write_tensorboard(run: TrackerRun, folder: Path) -> list[Path]:
    """Write texts and metrics of the run to ``folder/NAME``, or ``NAME-2`` if that has another recording, and the curves of each rank to
    a subfolder. Returns the files, that of the run first. Raises DdpDoctorError."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise missing_package("tensorboard", error) from error
    second = 0 if run.started_s is None else run.started_s
    file_name = _FILE_NAME.format(second=int(second), recording=run.recording)
    top = _own_folder(folder, run, file_name)
    by_run: dict[str, list[Curve]] = {}
    for curve in run.curves:
        by_run.setdefault(curve.source, []).append(curve)
    last = max((curve.steps[-1] for curve in run.curves if curve.steps), default=0)
    values = {top: [*_texts(run), *((last, _scalar(name, value)) for name, value in run.metrics.items())]}
    values |= {top / source: _points(curves) for source, curves in by_run.items()}
    written = []
    for place, found in values.items():
        events = [Event(wall_time=second, file_version=_VERSION)]
        events += [Event(wall_time=second, step=step, summary=summary) for step, summary in found]
        file = place / file_name
        place.mkdir(parents=True, exist_ok=True)
        write_file(file, _records(event.SerializeToString() for event in events), EVENTS)
        written.append(file)
    return written


def _own_folder(folder: Path, run: TrackerRun, file_name: str) -> Path:
    """The first of the folders NAME, NAME-2, ... without files of another recording."""
    places = (folder / (f"{run.name}-{n}" if n > 1 else run.name) for n in count(1))
    return next(
        place for place in places if all(file.name == file_name for file in place.glob(_FILE_PATTERN))
    )


def _points(curves: Sequence[Curve]) -> list[tuple[int, Any]]:
    return [
        (step, _scalar(curve.name, value))
        for curve in curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]


def _records(events: Iterable[bytes]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    whole = io.BytesIO()
    writer = RecordWriter(whole)
    for event in events:
        writer.write(event)
    return whole.getvalue()


def _scalar(name: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value)])


def _texts(run: TrackerRun) -> list[tuple[int, Any]]:
    """Verdict and findings as Markdown summaries for TensorBoard's "Text" tab."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    plugin = SummaryMetadata.PluginData(
        plugin_name="text", content=TextPluginData(version=0).SerializeToString()
    )
    texts = {"verdict": run.verdict, **{f"findings/{name}": text for name, text in run.findings.items()}}
    found = []
    for name, text in texts.items():
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode("utf-8", "backslashreplace")],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        found.append((0, Summary(value=[value])))
    return found
