"""The house's order as tables: which package, and which room of a package, may import which; ``test_layers`` holds to it."""

from __future__ import annotations

ALLOWED = {
    "errors": (),
    "aside": (),
    "cachefolder": (),
    "deferred": (),
    "parentdeath": (),
    "plain": (),
    "rundir": (),
    "hook": ("rundir",),
    "telemetry": ("rundir", "deferred", "plain"),
    "trace": ("rundir", "errors", "aside", "cachefolder", "parentdeath"),
    "measure": ("trace", "rundir", "errors", "deferred"),
    "diagnose": ("measure", "rundir", "errors", "aside", "cachefolder", "plain"),
    "report": ("diagnose", "rundir", "errors", "deferred", "plain"),
    "launch": ("rundir", "telemetry", "errors", "parentdeath"),
    "demo": ("errors",),
    "analysis": ("rundir", "telemetry", "trace", "measure", "diagnose", "report", "errors"),
    "cli": (
        "rundir",
        "telemetry",
        "launch",
        "demo",
        "analysis",
        "measure",
        "diagnose",
        "report",
        "trace",
        "errors",
        "plain",
        "parentdeath",
    ),
    "__main__": ("cli",),
    "__init__": ("analysis", "diagnose"),
}
"""Package or top-level module → what of ours it may import. Nothing imports upwards."""

DOORS = {
    ("launch", "ddpdoctor.hook.environment"): "the names of the variables by which launcher and hook talk",
    ("report", "ddpdoctor.measure.facts"): "the types of the facts that a Diagnosis is made of",
    ("report", "ddpdoctor.measure.taxonomy"): "the parts of a step, which reports name and colour",
}
"""Single modules that may be imported beyond the table, and why."""

ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "measure": {
        "taxonomy": (),
        "telemetry": (),
        "facts": ("taxonomy",),
        "summary": (),
        "numerics": (),
        "phases": ("numerics", "taxonomy"),
        "steplog": ("phases", "numerics", "facts", "taxonomy"),
        "window": ("phases", "numerics", "taxonomy"),
        "align": ("window", "steplog", "numerics", "telemetry"),
        "graph": ("align", "window", "steplog", "phases", "numerics", "taxonomy"),
        "replay": ("graph", "numerics", "taxonomy"),
        "attribution": ("graph", "numerics", "taxonomy"),
        "sourcelines": ("window", "steplog", "phases", "numerics", "facts", "taxonomy"),
        "metrics": ("graph", "window", "steplog", "numerics", "facts", "summary", "telemetry", "taxonomy"),
        "costs": (
            "metrics",
            "attribution",
            "replay",
            "graph",
            "sourcelines",
            "window",
            "steplog",
            "numerics",
            "facts",
            "taxonomy",
        ),
        "caveats": ("graph",),
        "hta": ("export",),
        "flow": (
            "caveats",
            "costs",
            "metrics",
            "attribution",
            "sourcelines",
            "graph",
            "align",
            "window",
            "steplog",
            "facts",
            "summary",
            "telemetry",
            "taxonomy",
        ),
        "pipeline": ("metrics", "numerics", "facts"),
        "export": ("align", "window", "steplog", "numerics", "telemetry", "taxonomy"),
    },
    "hook": {
        "environment": (),
        "finder": (),
        "guard": (),
        "patching": ("guard",),
        "job": (),
        "recording": ("job", "patching", "guard"),
        "profiling": ("recording", "job", "patching", "guard", "environment"),
        "settings": ("recording", "job", "guard"),
        "services": ("settings", "profiling", "recording", "patching", "guard"),
        "lifetime": ("services", "profiling", "recording", "patching", "guard", "environment"),
        "patches": ("lifetime", "profiling", "recording", "job", "patching", "guard", "finder"),
        "marks": ("lifetime", "recording", "patching", "guard"),
        "install": ("patches", "patching", "guard"),
    },
    "trace": {
        "sources": (),
        "columns": ("sources",),
        "classify": ("columns",),
        "formats": ("sources", "columns", "classify"),
        "cache": ("sources", "columns", "formats"),
        "engines": ("sources", "columns", "formats", "cache"),
        "job": ("sources", "columns", "formats", "engines"),
        "digest": ("sources", "columns", "job"),
        "operations": ("sources",),
    },
}
"""Package → its rooms (its sub-packages, and single modules beside them) → which rooms of that package each may import.

A package without an entry is one room. Its own ``__init__`` may import every room of it; no room imports that."""

INSIDES: dict[tuple[str, str], str] = {
    ("tests/rundir/test_raw_traces.py", "ddpdoctor.hook.profiling.trace_file"): "how much room a trace needs",
    ("tests/rundir", "ddpdoctor.measure.steplog.record"): "all kinds of records against the schema",
    ("tests/measure/steplog/test_devicetime.py", "ddpdoctor.measure.steplog.devicetime"): "one step moved",
    ("tests/measure/steplog/test_long_logs.py", "ddpdoctor.measure.steplog.bound"): "made small for the test",
    ("tests/measure/steplog/test_long_logs.py", "ddpdoctor.measure.steplog.reading"): "what it decodes",
    ("tests/measure/metrics/test_reducer.py", "ddpdoctor.measure.metrics.search"): "the names it looks for",
    ("tests/measure/pipeline/test_stragglers.py", "ddpdoctor.measure.pipeline.stragglers"): "one scenario",
    ("tests/measure/sourcelines/test_of_windows.py", "ddpdoctor.measure.sourcelines.of_windows"): "its bound",
    ("tests/measure/costs/test_sureness.py", "ddpdoctor.measure.costs.sureness"): "ranges of made series",
    ("tests/measure/costs/test_whatif.py", "ddpdoctor.measure.costs.whatif"): "single scenarios",
    ("tests/hook/profiling", "ddpdoctor.hook.profiling.stacks"): "stacks as the sampler reads them",
    ("tests/hook/profiling", "ddpdoctor.hook.profiling.window"): "what it calls of torch is replaced",
    ("tests/hook/test_thinning.py", "ddpdoctor.hook.recording.thinning"): "its constants",
    (
        "benchmarks/loading",
        "ddpdoctor.trace.formats.kineto",
    ): "the same decoder without all that is around it",
    (
        "tests/trace/formats",
        "ddpdoctor.trace.formats.kineto",
    ): "times are tested as numbers, not as files of them",
    (
        "tests/trace/test_trace_bounds.py",
        "ddpdoctor.trace.formats.kineto",
    ): "each search alone must be linear",
}
"""(Folder or file of the importer, what it imports from inside a room) → why the room's door does not do."""
