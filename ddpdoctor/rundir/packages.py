"""Packages that many jobs use and do not change: of a line in one of them and a line outside, reports show the job's
own."""

from __future__ import annotations

import re

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
"""Functions of these packages, without their class, that run a whole loop and call the user's hooks and callbacks from it, or that tell
an evaluation's hooks from those of the training."""

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)", re.DOTALL)


LIBRARY = re.compile(r".*[/\\](site-packages|dist-packages|lib(?:64)?[/\\]python[\d.]+)[/\\]", re.DOTALL)
"""The beginning of the path of a file of an installed package or of Python's own, with the folder that they lie in."""
_OURS = re.compile(r".*[/\\]ddpdoctor[/\\]hook[/\\]", re.DOTALL)


def is_library(file: str) -> bool:
    """Whether a file, by its path, is no part of the user's program: of an installed package, Python's own,
    generated, or of what records the job."""
    return file.startswith("<") or LIBRARY.match(file) is not None or _OURS.match(file) is not None


def is_well_known(file: str) -> bool:
    """Whether ``file`` lies in such a package, as it is installed."""
    found = _INSTALLED.match(file)
    return found is not None and found.group(1) in WELL_KNOWN


def is_training_loop(file: str, function: str) -> bool:
    """Whether ``function``, without its class, in ``file`` is one of :data:`TRAINING_LOOPS`."""
    found = _INSTALLED.match(file)
    return found is not None and function in TRAINING_LOOPS.get(found.group(1), ())
