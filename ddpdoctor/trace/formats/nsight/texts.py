"""What the text of an NVTX range says: an operator as PyTorch emits it, a library's call, or an annotation.

``emit_nvtx`` writes ``aten::mm, seq = 12, op_id = 34, sizes = [[8, 4], [4, 2]]``, of a user's ``record_function`` only the name
and ``op_id``. Without these it is a range that somebody pushed, or an operator of a PyTorch before 1.9.
"""

from __future__ import annotations

import re

import msgspec

from ddpdoctor.trace.formats.kineto.categories import is_annotation_name

OPERATOR, ANNOTATION, LIBRARY = "cpu_op", "user_annotation", "library"

_FIELDS = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")
"""What follows an emitted name, in this order."""
_SIZES = re.compile(r", sizes = (\[[][0-9, -]*\])")
_NAMESPACE = re.compile(
    r"(?:aten|autograd|prims?|torch|torchvision|torchaudio|quantized|flash_attn|xformers|_?c10d(?:_functional)?)::"
)
"""Of operators whose text says nothing else."""
_OPERATOR = re.compile(r"(?!FSDP::)[\w.]+::[\w.:]+$|record_param_comms$|detach$|[a-z]\w*_$|\w+Backward\d*$")
"""Emitted names that are operators': of any library's namespace; without one those of the profiler, in place, and of autograd."""
_LIBRARY = re.compile(r"nccl[A-Z]|cu(?:blas|dnn|sparse|solver|fft|tensor|rand)|cub::|thrust::|nvshmem|ucp?_")
"""Calls of libraries that NVIDIA's tools mark themselves."""
_OF_A_RANK = (
    "c10d::", "gloo:", "nccl:", "Optimizer.step#", "DistributedDataParallel.", "ProfilerStep", "autograd::engine",
)  # fmt: skip


class Range(msgspec.Struct, frozen=True):
    """What a range is."""

    name: str
    category: str
    shapes: str = ""
    """Dimensions of an operator's inputs as compact JSON, "" where they are not told."""


def marks_a_rank(text: str | None) -> bool:
    """Whether only a process that trains pushes such a range."""
    return text is not None and text.startswith(_OF_A_RANK)


def read_text(text: str) -> Range:
    """What a range of this text is."""
    if _LIBRARY.match(text):
        return Range(text, LIBRARY)
    begins = [place for field in _FIELDS if (place := text.find(field)) > 0]
    if not begins:
        is_operator = _NAMESPACE.match(text) is not None and not is_annotation_name(text)
        return Range(text, OPERATOR if is_operator else ANNOTATION)
    name, rest = text[: min(begins)], text[min(begins) :]
    sizes = _SIZES.search(rest)
    category = OPERATOR if _is_operator(name, rest) else ANNOTATION
    return Range(name, category, sizes[1].replace(" ", "") if sizes else "")


def _is_operator(name: str, rest: str) -> bool:
    """Whether an emitted name is an operator's: an annotation has no number in the sequence of autograd, nor sizes."""
    if is_annotation_name(name):
        return False
    numbered = rest.startswith(_FIELDS[0]) and not rest.startswith(", seq = -")
    return numbered or _NAMESPACE.match(name) is not None or _OPERATOR.match(name) is not None
