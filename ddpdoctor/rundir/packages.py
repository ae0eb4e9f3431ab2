"""Classifies files by path: packages that many jobs use and do not change, and the job's own code, whose lines reports prefer. Also
parses faulthandler's output: the stacks of all threads, Python's first thread last, and the signal before a crash."""

from __future__ import annotations

import re
import signal

# fmt: off
WELL_KNOWN = frozenset((
    "PIL", "accelerate", "albumentations", "apex", "botocore", "composer", "cv2", "dask", "datasets", "deepspeed",
    "diffusers", "einops", "fairscale", "flash_attn", "fsspec", "h5py", "huggingface_hub", "ignite", "imageio",
    "joblib", "jsonlines", "keras", "kornia", "lightning", "lightning_fabric", "lightning_utilities", "lmdb", "matplotlib",
    "megatron", "mlflow", "mmengine", "monai", "mosaicml", "multiprocess", "nltk", "numba", "numpy", "omegaconf",
    "orjson", "packaging", "pandas", "peft", "polars", "psutil", "pyarrow", "pytorch_lightning", "ray",
    "regex", "requests", "s3fs", "safetensors", "scipy", "sentencepiece", "skimage", "sklearn", "soundfile",
    "streaming", "tensorboard", "tensorboardX", "timm", "tokenizers", "torchaudio", "torchdata",
    "torchmetrics", "torchtext", "torchvision", "tqdm", "transformers", "trl", "triton", "ujson", "urllib3",
    "wandb", "webdataset", "xformers", "yaml", "zarr",
))
# fmt: on
TRAINING_LOOPS = {
    "composer": frozenset(("fit", "eval")),
    "ignite": frozenset(("run",)),
    "lightning": frozenset(("fit", "validate", "test", "predict", "_evaluation_step")),
    "mmengine": frozenset(("train", "val", "test")),
    "pytorch_lightning": frozenset(("fit", "validate", "test", "predict", "_evaluation_step")),
    "transformers": frozenset(("train", "evaluate", "predict")),
}
"""Functions (without their class) of these packages that run a whole loop and call the user's hooks and callbacks from it, or whose
frame distinguishes hooks called in an evaluation from those called in training."""

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)", re.DOTALL)


LIBRARY = re.compile(r".*[/\\](site-packages|dist-packages|lib(?:64)?[/\\]python[\d.]+)[/\\]", re.DOTALL)
"""Beginning of the path of a file of an installed package or of Python itself, with the folder that contains them."""
_OWN = re.compile(r".*[/\\]ddpdoctor[/\\](?:hook|rundir)[/\\]", re.DOTALL)


def is_library(file: str) -> bool:
    """Whether a file, by its path, is not part of the user's program: it belongs to an installed package, to Python or to the code
    that records, or is generated."""
    return file.startswith("<") or LIBRARY.match(file) is not None or _OWN.match(file) is not None


def is_well_known(file: str) -> bool:
    """Whether ``file`` belongs to an installed package of ``WELL_KNOWN``."""
    found = _INSTALLED.match(file)
    return found is not None and found.group(1) in WELL_KNOWN


def is_training_loop(file: str, function: str) -> bool:
    """Whether ``function``, without its class, in ``file`` is one of :data:`TRAINING_LOOPS`."""
    found = _INSTALLED.match(file)
    return found is not None and function in TRAINING_LOOPS.get(found.group(1), ())


TextFrame = tuple[str, int, str]
"""File, line and function."""

_FATAL, _ASKED, _CURRENT = "Fatal Python error", "Stack (most recent call first):", "Current thread 0x"
_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+|Stack \()[^\n]*\n", re.MULTILINE)
_FRAME = re.compile(r'^\s+File "([^"\n]+)", line (\d{1,9}) in (.+)$', re.MULTILINE)
_MOST_FUNCTION = 60
"""Upper limit of the characters of a function's name in a sentence."""

_FATAL_SIGNALS = {
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
    "Segmentation fault": signal.SIGSEGV,
}
"""faulthandler's names of fatal signals."""


def fatal_signal(text: str) -> int | None:
    """The signal that ended a process, from faulthandler's last text; None if it reported none."""
    words = text[text.rfind(_FATAL) + len(_FATAL) :].split("\n", 1)[0] if _FATAL in text else ""
    return _FATAL_SIGNALS.get(words.removeprefix(": "))


def says_gil_is_held(text: str) -> bool:
    """Whether the last text was written at the request signal, which shows that the GIL is held: otherwise Python threads would
    have answered or removed it."""
    return text.rfind(_ASKED) > text.rfind(_FATAL)


def first_thread(text: str) -> list[TextFrame]:
    """The stack of Python's first thread, innermost frame first."""
    threads = _THREAD.split(text)[1:]
    return _frames_in(threads[-1]) if threads else []


def faulting_thread(text: str) -> list[TextFrame]:
    """The stack of the training thread, innermost frame first: of the thread with the fault, or of the first thread if the text was
    written because the GIL was held."""
    begin = max(map(text.rfind, (_FATAL, _ASKED)))
    if begin < 0:
        return []
    last = text[begin:]
    current = last.rfind(_CURRENT)
    # Empty if the text ends within this thread's first line.
    threads = _THREAD.split(last[current:])[1:] if current >= 0 and not says_gil_is_held(text) else []
    stack = _frames_in(threads[0]) if threads else []
    # A thread not created by Python has no Python stack.
    return stack or first_thread(last)


def innermost_frame(text: str, *, or_library: bool = False) -> TextFrame | None:
    """The innermost frame of the job's own code in Python's first thread; with ``or_library``, otherwise that of any code. None if
    there is none."""
    stack = first_thread(text)
    own = [frame for frame in stack if not is_library(frame[0])]
    return next(iter(own or (stack if or_library else [])), None)


def innermost_line(text: str, *, or_library: bool = False) -> str:
    """Like ``innermost_frame``, as ``train.py:12 (main)``; "" if there is none."""
    found = innermost_frame(text, or_library=or_library)
    if found is None:
        return ""
    file, line, function = found
    return f"{file.rpartition('/')[2]}:{line} ({function[:_MOST_FUNCTION]})"


def _frames_in(thread: str) -> list[TextFrame]:
    return [(file, int(line), function) for file, line, function in _FRAME.findall(thread)]
