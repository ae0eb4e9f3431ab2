"""What rules say of torch and of commands, looked up in the installed torch: names, arguments, defaults, variables; and shell syntax."""

from __future__ import annotations

import ast
import importlib
import inspect
import mmap
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from ddpdoctor.diagnose.load import packaged_folder
from tests.rules.snippet_code import names_taken
from tests.rules.snippets import Snippet, rendered

SNIPPETS = rendered()
_PYTHON = [each for each in SNIPPETS if each.kind != "shell"]
_SHELL = [each for each in SNIPPETS if each.kind == "shell"]

_MODULES = {
    "torch": "torch",
    "dist": "torch.distributed",
    "F": "torch.nn.functional",
    "dcp": "torch.distributed.checkpoint",
    "default_hooks": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "powerSGD": "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "DataLoader": "torch.utils.data.DataLoader",
    "DistributedSampler": "torch.utils.data.DistributedSampler",
}
"""Names that scripts give to parts of torch, where the snippet does not import them itself."""

_ONLY_WITH_CUDA = {"torch.distributed.ProcessGroupNCCL": "class ProcessGroupNCCL"}
"""Names that a torch without CUDA lacks, and what its type stubs have for them."""


@pytest.mark.extended
def test_names_and_arguments_exist_in_torch() -> None:
    pytest.importorskip("torch")
    wrong = [f"{each.rule}: {problem}" for each in _PYTHON for problem in _problems(each)]
    assert not wrong, "\n".join(sorted(set(wrong)))


def _problems(snippet: Snippet) -> Iterator[str]:
    tree = ast.parse(snippet.text)
    names = dict(_MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        path = ast.unparse(node.func)
        head, _, rest = path.partition(".")
        if head not in names or not re.fullmatch(r"[\w.]+", path):
            continue
        whole = f"{names[head]}.{rest}".rstrip(".")
        if any(whole.startswith(each) for each in _ONLY_WITH_CUDA):
            continue
        found = _resolved(whole)
        if found is None:
            yield f"{whole} does not exist"
            continue
        try:
            parameters = inspect.signature(found).parameters
        except ValueError:
            continue  # written in C
        if not any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
            yield from (
                f"{whole} has no argument {k.arg}" for k in node.keywords if k.arg and k.arg not in parameters
            )


def _resolved(path: str) -> Any:
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for number, name in enumerate(rest):
        if not hasattr(found, name):
            try:
                importlib.import_module(".".join([first, *rest[: number + 1]]))
            except ImportError:
                return None
        found = getattr(found, name)
    return found


@pytest.mark.extended
def test_names_that_only_cuda_builds_have_are_in_the_stubs() -> None:
    torch = pytest.importorskip("torch")
    stub = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    assert all(text in stub for text in _ONLY_WITH_CUDA.values())
    assert "is_high_priority_stream" in stub


_GIVEN = frozenset(
    """model optimizer loss_fn loss loader dataset sampler batch_size num_workers device lr x y batch batches step epoch epochs rank
    local_rank world_size micro_batches metrics outputs output losses accuracy grad_norm correct count total running running_loss
    val_set val_loader teacher block lengths buckets path url body requests lock next_x_host train_step evaluate save do_it write_log
    update_metrics log_metrics compute_metrics decode data guarded takes_branch samples background upload create_model np cv2""".split()  # noqa: SIM905
)
"""Names that a snippet may take from the script: the objects of a training loop, and the user's own functions."""


def test_snippets_take_only_known_names_from_the_script() -> None:
    unknown = {(each.rule, name) for each in _PYTHON for name in names_taken(each.text) if name not in _GIVEN}
    assert not unknown


def test_loaders_of_snippets_keep_each_rank_s_part() -> None:
    """A DataLoader without the script's sampler gives every rank the same samples, and nothing fails."""
    lacking: set[tuple[str, int]] = set()
    for each in _PYTHON:
        calls = [node for node in ast.walk(ast.parse(each.text)) if isinstance(node, ast.Call)]
        loaders = [node for node in calls if ast.unparse(node.func) == "DataLoader"]
        if any("sampler" not in {keyword.arg for keyword in node.keywords} for node in loaders):
            lacking.add((each.rule, each.fix))
    # Those of an IterableDataset, which takes none, are another text of the same fix.
    with_sampler = {(each.rule, each.fix) for each in _PYTHON if "sampler=" in each.text}
    assert not lacking - with_sampler


def test_no_snippet_passes_dots_as_an_argument() -> None:
    """``DataLoader(..., num_workers=2)`` is a program, but one that raises."""
    calls = [
        (each, node)
        for each in _PYTHON
        for node in ast.walk(ast.parse(each.text))
        if isinstance(node, ast.Call)
    ]
    dots = {each.rule for each, call in calls for argument in call.args if ast.unparse(argument) == "..."}
    assert not dots


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model = DistributedDataParallel(model)", ["model"]),
        ("totals = torch.zeros(3)\ntotals += loss", ["loss"]),
        ("running += loss", ["loss", "running"]),
        ("steps = [s for s in parts]\nlast = steps[-1]", ["parts"]),
        ("import math\nfor x, y in batches:\n    print(math.sin(x))", ["batches"]),
    ],
)
def test_names_that_a_snippet_takes(text: str, names: list[str]) -> None:
    assert names_taken(text) == names


@pytest.mark.parametrize("snippet", _SHELL, ids=[f"{each.rule}-{each.fix}" for each in _SHELL])
def test_shell_syntax(snippet: Snippet) -> None:
    text = re.sub(r"<[^<>\n]+>", "PLACE", snippet.text)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_of_ddpdoctor_exist() -> None:
    from ddpdoctor.cli.main import cli

    for each in _SHELL:
        for command, options in re.findall(r"^ddpdoctor (\w+)(.*?)(?: -- |#|$)", each.text, re.MULTILINE):
            found = cli.get_command(click.Context(cli), command)
            assert found is not None, command
            known = {name for parameter in found.params for name in parameter.opts}
            assert set(re.findall(r"(?<=\s)-[-\w]+", options)) <= known, each.text


@pytest.mark.extended
def test_options_of_torchrun_exist() -> None:
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    known = get_args_parser()._option_string_actions
    for each in SNIPPETS:
        for options in re.findall(r"torchrun(.*?)(?:\.\.\.|#|\||$)", each.text, re.MULTILINE):
            assert {name.partition("=")[0] for name in re.findall(r"--[\w-]+", options)} <= set(known), (
                each.text
            )


_NCCL = {
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET",
    "NCCL_NSOCKS_PERTHREAD", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS",
}  # fmt: skip
"""Read in NCCL's documentation (user-guide/docs/env.html), which no package here has."""
_ELSEWHERE = {"OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "PYTHONFAULTHANDLER", "GLOO_SOCKET_IFNAME"}
"""Of OpenMP, CUDA, Python, and torch's Gloo, in a part of torch that is looked up below."""


@pytest.mark.extended
def test_environment_variables_exist() -> None:
    torch = pytest.importorskip("torch")
    rules = "".join(path.read_text() for path in packaged_folder().rglob("*.yaml"))
    named = (
        set(re.findall(r"\b(?:TORCH|PYTORCH|NCCL|GLOO|OMP|CUDA)_[A-Z0-9_]+\b", rules)) - _NCCL - _ELSEWHERE
    )
    folder = Path(torch.__file__).parent
    files = [*(folder / "lib").glob("lib*.so*"), *folder.glob("include/torch/csrc/distributed/c10d/*.hpp")]
    found = {name for file in files if file.stat().st_size for name in named if _holds(file, name)}
    assert named - found == set()


def _holds(file: Path, text: str) -> bool:
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0


def _default(path: str, argument: str) -> Callable[[], Any]:
    return lambda: inspect.signature(_resolved(path)).parameters[argument].default


def _says(path: str, text: str) -> Callable[[], Any]:
    """Whether the source of the object, with its docstring, has the text."""
    return lambda: text in " ".join(inspect.getsource(_resolved(path)).split())


_DDP = "torch.nn.parallel.DistributedDataParallel"
_JOIN = "torch.nn.parallel.DistributedDataParallel.join"
_BF16 = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook"
_SAVE = "torch.distributed.checkpoint.async_save"
_CLAIMS: list[tuple[str, str, Callable[[], Any], Any]] = [
    ("allreduce/small-buckets", "PyTorch's default is 25", lambda: _resolved("torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB"), 25),
    ("allreduce/communication-bound", "NCCL newer than 2.9.6", _says(_BF16, "later than 2.9.6"), True),
    ("ddp/unused-parameters", "False is DDP's default", _default(_DDP, "find_unused_parameters"), False),
    ("ddp/bucket-view", "gradient_as_bucket_view=False", _default(_DDP, "gradient_as_bucket_view"), False),
    ("ddp/bucket-view", "zero_grad(set_to_none=False)", _default("torch.optim.Optimizer.zero_grad", "set_to_none"), True),
    ("sync/buffer-broadcast", "torch 2.13 and newer: forward_sync_buffers", _says(_DDP, "`broadcast_buffers` is deprecated."), True),
    ("sync/buffer-broadcast", "leaves out the first broadcast", _says(_DDP, "`forward_sync_buffers=False` still syncs buffers at"), True),
    ("hang/uneven-inputs", "divide_by_initial_world_size=True, the default", _default(_JOIN, "divide_by_initial_world_size"), True),
    ("dataloader/starved", "torch 2.6 and newer", _default("torch.utils.data.DataLoader", "in_order"), True),
    ("dataloader/one-rank-late", "torch 2.6 and newer", _default("torch.utils.data.DataLoader", "in_order"), True),
    ("dataloader/one-rank-late", "loader.prefetch_factor or 2", _says("torch.utils.data.DataLoader", "prefetch_factor = 2"), True),
    ("dataloader/starved", "names forkserver and spawn for NCCL", _says(_DDP, "NCCL2 are not fork safe"), True),
    ("dataloader/worker-restart", "persistent_workers=False", _default("torch.utils.data.DataLoader", "persistent_workers"), False),
    ("sync/checkpoint", "group of its own", _default(_SAVE, "process_group"), None),
    ("sync/checkpoint", 'new_group(backend="gloo")', _says(_SAVE, "A CPU backend must be enabled for async save"), True),
    ("gpu/memory-full", "torch 2.6 and newer", lambda: _resolved("torch.distributed.fsdp.fully_shard") is not None, True),
    ("gpu/no-tensor-cores", '"highest"', lambda: _resolved("torch.get_float32_matmul_precision")(), "highest"),
    ("gpu/launch-bound", "Wrap with DDP first, then compile", _says("torch._dynamo.backends.distributed.DDPOptimizer", "DDP"), True),
    ("hang/rank-raised", "@record", lambda: _resolved("torch.distributed.elastic.multiprocessing.errors.record") is not None, True),
]  # fmt: skip
"""Rule, words of it, and what the installed torch has for them."""


@pytest.mark.extended
@pytest.mark.parametrize("claim", _CLAIMS, ids=[f"{rule}: {words}" for rule, words, _, _ in _CLAIMS])
def test_claims_hold_in_the_installed_torch(claim: tuple[str, str, Callable[[], Any], Any]) -> None:
    pytest.importorskip("torch", minversion="2.13")
    rule, words, found, expected = claim
    text = " ".join((packaged_folder() / f"{rule}.yaml").read_text(encoding="utf-8").split())
    assert words in text, "the rule says something else now"
    assert found() == expected
