"""DDP's settings, and what looking for unused parameters costs."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.measure.facts import DdpFacts
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.window import Window

from .search import searches_unused
from .userlines import users_line


def ddp_facts(logs: Sequence[RankLog], windows: Sequence[Window], search_ms: float | None) -> DdpFacts:
    """Settings of the largest DDP module of the first rank that has one; ``search_ms`` as :func:`.search.search_ms` gives it.

    Whether unused parameters are looked for is seen in the windows where no setting says it.
    """
    log = next((log for log in logs if log.record.info.get("ddp")), None)
    if log is None:
        return DdpFacts(find_unused_parameters=searches_unused(windows), search_ms=search_ms)
    ddp = max(log.record.info["ddp"], key=lambda module: module.get("parameters_bytes") or 0)
    stated = ddp.get("find_unused_parameters")
    return DdpFacts(
        module=ddp.get("module"),
        parameters_bytes=ddp.get("parameters_bytes"),
        find_unused_parameters=searches_unused(windows) if stated is None else stated,
        unused_parameter_bytes=ddp.get("unused_parameter_bytes"),
        search_ms=search_ms,
        gradient_as_bucket_view=ddp.get("gradient_as_bucket_view"),
        static_graph=ddp.get("static_graph"),
        broadcast_buffers=ddp.get("broadcast_buffers"),
        buffer_bytes=ddp.get("buffer_bytes"),
        comm_hook=ddp.get("comm_hook"),
        where=users_line(log, ddp.get("where")),
    )
