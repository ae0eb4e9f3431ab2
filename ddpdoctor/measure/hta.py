"""For notebooks: a trace's columns as HolisticTraceAnalysis's own container, for its other analysers. See docs/hta.md."""

from ddpdoctor.measure.export import hta_trace

__all__ = ["hta_trace"]
