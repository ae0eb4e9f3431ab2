"""The settings that a trial can change, their values, and whether they may change results."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from ddpdoctor.errors import DdpDoctorError

ENVIRONMENT = "env"
_ENVIRONMENT_NAMES = re.compile(
    r"(NCCL|GLOO|TORCH|TP|FI|UCX|OMP|MKL|OPENBLAS|NUMEXPR|KMP|GOMP|CUDA|CUBLAS|CUDNN|PYTORCH|MALLOC|NVIDIA|HSA|RCCL|TOKENIZERS)_[A-Z0-9_]+"
)
"""Environment variables that affect speed. Others (PATH, LD_PRELOAD, ddpdoctor's own) might change what the job does."""


MOST = 1024
"""Limit of workers, batches or threads; more would exhaust the machine."""
_MOST_TEXT = 2000
_YES, _NO = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


class Results(Enum):
    """How a setting affects the numbers that the job computes."""

    SAME = "bits stay the same"
    LAST_BITS = "the last bits may change"
    OTHER = "results change"
    MEANINGLESS = "for measuring only: the job no longer trains"


class SettingError(DdpDoctorError):
    """An unknown setting, or a value that the setting does not accept."""


@dataclass(frozen=True)
class Setting:
    """A setting that can be changed without editing the script."""

    name: str
    says: str
    takes: str
    """Description of the allowed values."""
    parse: Callable[[str], Any]
    """Converts a text to a value. Raises ValueError."""
    results: Results = Results.SAME

    @property
    def is_bound(self) -> bool:
        """Whether it simulates the job without a cause of lost time, to measure an upper bound of the saving."""
        return self.results is Results.MEANINGLESS


def _boolean(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError(text)
    return text.lower() in _YES


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= MOST:
            raise ValueError(text)
        return value

    return parse


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < 1 << 20:
        raise ValueError(text)
    return value


def _text(text: str) -> str:
    if len(text) > _MOST_TEXT or "\0" in text:
        raise ValueError(text)
    return text


def _switch(name: str, says: str, results: Results = Results.SAME) -> Setting:
    return Setting(name, says, "true or false", _boolean, results)


def _choice(name: str, says: str, values: str, results: Results = Results.SAME) -> Setting:
    """``values``: the allowed values as a text, "a, b or c"."""

    def parse(text: str) -> str:
        if text not in re.split(", | or ", values):
            raise ValueError(text)
        return text

    return Setting(name, says, values, parse, results)


_LAST, _OTHER, _NONE = Results.LAST_BITS, Results.OTHER, Results.MEANINGLESS
_MATMUL = "precision of float32 matrix products (high: TF32)"
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("loader.num_workers", "worker processes of each DataLoader", f"0 to {MOST}", _count(0)),
        Setting(
            "loader.prefetch_factor", "batches that each worker prepares ahead", f"1 to {MOST}", _count(1)
        ),
        _switch("loader.persistent_workers", "workers stay between epochs"),
        _switch(
            "loader.pin_memory", "batches in page-locked memory, so that copies overlap with computation"
        ),
        Setting("ddp.bucket_cap_mb", "MB of gradients that DDP reduces together", "above 0", _size, _LAST),
        _switch("ddp.gradient_as_bucket_view", "gradients are views of the buckets: one copy less"),
        _switch("ddp.static_graph", "DDP may assume the same graph in each step"),
        _switch("ddp.find_unused_parameters", "DDP looks for parameters without gradient in each step"),
        _switch("ddp.broadcast_buffers", "rank 0's buffers are broadcast before each forward pass", _OTHER),
        _choice("ddp.comm_hook", "gradients are sent in 16 bits", "fp16 or bf16", _OTHER),
        _switch("ddp.accumulate", "gradients are reduced in the last micro-batch only (no_sync)", _LAST),
        _choice("amp.autocast", "the forward pass in mixed precision", "bf16 or fp16", _OTHER),
        _switch("optimizer.foreach", "one kernel for many parameters", _LAST),
        _switch("optimizer.fused", "one kernel for the whole update", _LAST),
        Setting("torch.threads", "threads of torch's operators on CPUs", f"1 to {MOST}", _count(1), _LAST),
        _choice("torch.matmul_precision", _MATMUL, "highest, high or medium", _OTHER),
        _switch("torch.cudnn_benchmark", "cuDNN tries its algorithms and keeps the fastest", _LAST),
        _choice("cpu.affinity", "each rank on its own share of the cores", "spread"),
        _switch("loader.instant", "batches are made once and reused, at no cost", _NONE),
        _switch("ddp.no_sync", "gradients are never reduced", _NONE),
        _choice("sync.barriers", "the script's barriers return at once", "skip", _NONE),
    )
}


def setting_of(name: str) -> Setting:
    """The setting of this name. Raises SettingError."""
    if name in SETTINGS:
        return SETTINGS[name]
    kind, _, variable = name.partition(".")
    if kind == ENVIRONMENT:
        if not _ENVIRONMENT_NAMES.fullmatch(variable):
            raise SettingError(
                f"{name}: only variables that tune libraries can be tried, such as env.NCCL_BUFFSIZE."
            )
        takes = f"a text of at most {_MOST_TEXT:,} letters"
        return Setting(name, f"environment variable {variable}", takes, _text, Results.LAST_BITS)
    near = get_close_matches(name, SETTINGS, 1)
    also = f" Did you mean {near[0]}?" if near else f" There are {', '.join(SETTINGS)} and env.VARIABLE."
    raise SettingError(f"{name} is not a setting that can be tried.{also}")


def parse_setting(text: str) -> tuple[str, Any]:
    """(name, value) of ``NAME=VALUE``. Raises SettingError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(f"--set {text}: give a name and a value, as in loader.num_workers=4.")
    return name.strip(), parse_value(name.strip(), value.strip())


def parse_value(name: str, text: str) -> Any:
    """The value of a setting. Raises SettingError."""
    setting = setting_of(name)
    try:
        return setting.parse(text)
    except (ValueError, OverflowError):
        raise SettingError(f"{name}={text[:80]}: it takes {setting.takes}.") from None
