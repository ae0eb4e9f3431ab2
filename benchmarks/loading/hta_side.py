"""HolisticTraceAnalysis loads a folder and does two of its analyses. Runs in HTA's own environment."""

from __future__ import annotations

import sys

from hta.trace_analysis import TraceAnalysis


def main(folder: str) -> None:
    """Temporal breakdown, and overlap of communication with computation."""
    analysis = TraceAnalysis(trace_dir=folder)
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)


if __name__ == "__main__":
    main(sys.argv[1])
