"""The same job on another vendor's devices: a made trace in the words of XPU has the same diagnosis."""

from __future__ import annotations

import gzip

import pytest

from ddpdoctor.analysis import Options, analyze
from tests.generator import generate
from tests.generator.cases import case

XPU = {
    '"cuda_runtime"': '"xpu_runtime"',
    "cudaLaunchKernelExC": "urEnqueueKernelLaunch",
    "cudaLaunchKernel": "urEnqueueKernelLaunch",
    "cudaMemcpyAsync": "urEnqueueUSMMemcpy",
    "cudaStreamSynchronize": "urQueueFinish",
    "ncclDevKernel_AllReduce": "oneccl_allreduce",
    "Memcpy HtoD": "Memcpy M2D",
}
"""What CUDA and NCCL call it → what Level Zero's adapter and oneCCL do."""


def test_in_the_words_of_xpu(tmp_path):
    made = case("A")
    ours, theirs = tmp_path / "cuda", tmp_path / "xpu"
    generate(made.config, ours)
    theirs.mkdir()
    for path in ours.glob("*.json.gz"):
        text = gzip.decompress(path.read_bytes()).decode()
        for word, other in XPU.items():
            text = text.replace(word, other)
        (theirs / path.stem).write_text(text)
    mine, other = (analyze(str(folder), Options(cache=False, jobs=1)) for folder in (ours, theirs))
    assert [(f.rule, f.ranks) for f in other.findings] == [(f.rule, f.ranks) for f in mine.findings]
    assert other.findings[0].ranks == [made.culprit]
    prices = [f.costs_ms_per_step for f in mine.findings]
    assert [f.costs_ms_per_step for f in other.findings] == pytest.approx(prices, rel=0.001)
    assert other.breakdown == pytest.approx(mine.breakdown, abs=0.001)
