"""Nothing that was planted in any place of a run directory or a diagnosis is left in a redacted output."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import samples
from packed import readable_html
from rich.console import Console

from ddpdoctor.analysis import analyze
from ddpdoctor.diagnose.diagnosis import Coverage, Evidence, Finding, Fix, TelemetrySeries
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.report.json_output import to_json
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.redaction import redact
from ddpdoctor.report.sarif import to_sarif
from ddpdoctor.report.terminal import print_terminal

FIXTURE = Path(__file__).parents[2] / "fixtures" / "slow-data-one-rank"

ENVIRONMENT = {
    "NCCL_COMM_ID": "zebra-7.corp.example:2901",
    "NCCL_HOSTID": "quagga77",
    "NCCL_TOPO_FILE": "/opt/okapi files/topo.xml",
    "NCCL_NET_PLUGIN": "tapirnet",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "TORCH_HOME": "s3://ocelot-bucket/cache",
    "MASTER_ADDR": "ZEBRA-7",
    "SLURM_JOB_ID": "8675309",
    "SLURM_NODELIST": "zebra-[7-9]",
    "USER": "numbat",
}
NOTES = [
    "ZEBRA-7.CORP.EXAMPLE is slow, zebra-7 too, and zebra-8.corp.example.",
    "/mnt/aardvark data/secret set/file.bin is missing.",
    "Cannot open '/mnt/aardvark data/last set': no such file.",
    "See file:///mnt/aardvark/x, s3://ocelot-bucket/key, hf://datasets/dugong/set@main, gs://ocelot-bucket/a b.",
    "abfss://ocelot@kiwi.dfs.core.windows.net/x and https://wiki.kakapo.example/page?x=1 and tcp://zebra-7:29500",
    "C:\\Users\\numbat\\x and \\\\dugong\\share\\x and ~numbat/x and host:/export/aardvark/x",
    "numbat@kakapo.org wrote numbat_runs; 10.9.8.7, fe80::1ff:fe23:4567:890a and 2001:db8::7334 answered",
    "GPU-0a1b2c3d-1111-2222-3333-444455556666 at 0c:42:a1:de:ad:07 and 0x506b4b0300decade",
    "ip-10-9-8-7.ec2.internal answered, argument walrusname too",
]
CANARIES = (
    "quokka_sim",
    "zebra", "quagga", "okapi", "tapir", "ocelot", "aardvark", "dugong", "kiwi", "kakapo", "numbat", "10.9.8.7", "fe80",
    "2001:db8", "0a1b2c3d", "0c:42", "decade", "ip-10-9", "walrus", "8675309", "corp.example", "secret set", "last set",
)  # fmt: skip
COMMAND = [
    "torchrun",
    "--rdzv-endpoint=zebra-7:29500",
    "/home/numbat/my work/train.py",
    "--out",
    "/mnt/aardvark data/out",
    "--n=walrusname",
]


def planted():
    finding = Finding(
        rule="a/b",
        severity="info",
        title="Rank 1 on ZEBRA-7 reads /mnt/aardvark data/secret set/x.bin",
        explanation="numbat's files lie at s3://ocelot-bucket/key, `quokka_sim` and `python3.11` (1 core).",
        coverage=Coverage(1, 1),
        where=[Where("/home/numbat/my work/train.py", 3, "main"), Where("/mnt/aardvark data/lib/x.py", 3, "main")],
        evidence=[Evidence("late.compute.own_ms", "zebra-7", "", "Where it is: /mnt/aardvark data/x")],
        fixes=[Fix(title="t", why="w", docs=["https://wiki.kakapo.example/x", "https://docs.pytorch.org/docs/stable/data.html"])],
    )  # fmt: skip
    unhealthy = samples.unhealthy()
    job = msgspec.structs.replace(
        unhealthy.job, hosts=["ZEBRA-7.corp.example", "zebra-9"], command=COMMAND, environment=ENVIRONMENT
    )
    return msgspec.structs.replace(
        unhealthy,
        source=["/mnt/aardvark data/runs/1"],
        job=job,
        findings=[finding],
        notes=[*NOTES, "/mnt/aardvark data/runs/1/ranks/00000 is missing."],
        ranks=[msgspec.structs.replace(unhealthy.ranks[0], host="zebra-7.corp.example")],
        flames=[
            msgspec.structs.replace(
                unhealthy.flames[0],
                places=[CodeLine("/mnt/aardvark data/secret set/train.py", 5, "main"), *unhealthy.flames[0].places[1:]],
            )
        ],
        telemetry=[TelemetrySeries(source="ZEBRA-7 GPU 0", field="utilization", unit="percent", t_s=[0, 1], values=[1, 2])],
        facts={
            "zebra-7": {"path": "/mnt/aardvark data/x", "late.compute.ms": 3.0},
            "host": {"other_programs": [{"name": "quokka_sim", "cores": 1.0}, {"name": "python3.11", "cores": 1.0}]},
        },
        hta={"x": [{"name": "s3://ocelot-bucket/key"}]},
    )  # fmt: skip


def terminal(diagnosis):
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    print_terminal(diagnosis, console, verbose=True)
    return console.export_text()


OUTPUTS = {
    "html": readable_html,
    "markdown": render_markdown,
    "json": lambda diagnosis: to_json(diagnosis).decode(),
    "sarif": lambda diagnosis: json.dumps(to_sarif(diagnosis)),
    "terminal": terminal,
}


def left_in(text):
    plain = text.lower().replace("\\u002f", "/")
    return [canary for canary in CANARIES if re.search(rf"(?<![a-z]){re.escape(canary)}", plain)]


@pytest.mark.parametrize("form", OUTPUTS)
def test_no_redacted_output_has_a_planted_name(form):
    assert left_in(OUTPUTS[form](redact(planted()))) == []
    assert len(left_in(OUTPUTS[form](planted()))) > 3


def test_a_host_has_one_pseudonym_and_useful_values_stay():
    clean = redact(planted())
    assert clean.job.hosts == ["host-1", "host-2"]
    assert clean.ranks[0].host == "host-1" and clean.telemetry[0].source == "host-1 GPU 0"
    assert clean.notes[0].startswith("host-1 is slow, host-1 too, and host-")
    assert clean.notes[-1].endswith("/ranks/00000 is missing.")
    assert clean.findings[0].title.startswith("Rank 1 on host-1 reads path-")
    assert clean.findings[0].where[1].file.endswith("x.py")
    assert clean.findings[0].evidence[0].fact == "late.compute.own_ms"
    assert clean.findings[0].fixes[0].docs[1] == "https://docs.pytorch.org/docs/stable/data.html"
    kept = {
        "NCCL_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "NCCL_IB_HCA",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_VISIBLE_DEVICES",
    }
    assert {name for name, value in clean.job.environment.items() if value == ENVIRONMENT[name]} == kept


def test_a_program_named_by_an_ordinary_word_is_hidden_where_it_is_named_as_a_program():
    """Sentences show programs as code, so that the word itself stays in all others."""
    unhealthy = samples.unhealthy()
    finding = msgspec.structs.replace(
        unhealthy.findings[0], explanation="The data of `data` (1 core) is late."
    )
    facts = {"host": {"other_programs": [{"name": "data", "cores": 1.0}]}}
    clean = redact(msgspec.structs.replace(unhealthy, findings=[finding], facts=facts))
    (program,) = clean.facts["host"]["other_programs"]
    assert program["name"] != "data"
    assert clean.findings[0].explanation == f"The data of `{program['name']}` (1 core) is late."


def test_a_run_directory_with_names_in_every_file(tmp_path):
    run = tmp_path / "aardvark data" / "run"
    shutil.copytree(FIXTURE, run)
    for file in (run / "manifest.json", *run.glob("hosts/*/*.json*"), *run.glob("ranks/*/*.json*")):
        if file.suffix != ".gz":
            text = (
                file.read_text()
                .replace("host1", "ZEBRA-7.corp.example")
                .replace("/home/user/", "/home/numbat/okapi files/")
            )
            file.write_text(text)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest.update(
        notes=NOTES, environment=ENVIRONMENT, command=[*manifest["command"], *COMMAND[3:], COMMAND[1]]
    )
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "hosts" / "host1").rename(run / "hosts" / "ZEBRA-7.corp.example")
    diagnosis = analyze([str(run)])
    clean = redact(diagnosis)
    for form in OUTPUTS.values():
        assert left_in(form(clean)) == []
    assert len(left_in(OUTPUTS["json"](diagnosis))) > 3
    assert clean.verdict.rule == diagnosis.verdict.rule and clean.facts.keys() == diagnosis.facts.keys()


def test_reserved_words_stay_if_a_host_or_user_has_such_a_name():
    unhealthy = samples.unhealthy()
    job = msgspec.structs.replace(
        unhealthy.job, hosts=["data"], environment={"USER": "train"}, command=["python"]
    )
    clean = redact(msgspec.structs.replace(unhealthy, job=job))
    assert clean.job.hosts == ["host-1"] and clean.breakdown == unhealthy.breakdown
    assert clean.verdict == unhealthy.verdict
