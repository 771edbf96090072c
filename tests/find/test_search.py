"""The search for a micro-batch by short real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, SMALL, Ddpexp, Done, finish
from tests.launch.starters import free_port

MEMORY_KIB = 900_000  # of each process: a worker with a micro-batch of 8,192 pictures takes more, one with 1,024 less
LENET = (
    "recipe=mnist", "model=lenet", "data.source=embedded", "data.embedded_train=8192", "data.embedded_test=100",
    "trainer.device=cpu", "trainer.global_batch_size=8192", "trainer.epochs=null", "trainer.max_steps=2",
    "trainer.threads=1", "logger=none",
)  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Memory and numbers are looked at, not how processes start."""
    return warm_environ


def limited(ddpexp: Ddpexp, *arguments: str) -> Done:
    command = f'ulimit -d {MEMORY_KIB} && exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, sys.executable, "-m", "ddpexp", *arguments],
        cwd=ddpexp.folder, env=ddpexp.environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return finish(process, ddpexp.folder, PATIENCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_found_under_a_limit_trains_there_and_the_next_does_not(ddpexp: Ddpexp, tmp_path: Path) -> None:
    found = limited(ddpexp, "find", "batch_size", *LENET, "trainer.gpus=1", "--json")
    assert found.code == 0, found.err
    answer = json.loads(found.out)
    sizes = {one["micro_batch_size"]: one["outcome"] for one in answer["tried"]}
    largest = answer["largest"]
    assert sizes[2 * largest] == "out of memory"
    assert answer["overrides"]["largest"] == f"trainer.micro_batch_size={largest}"
    trained = limited(ddpexp, *LENET, "trainer.gpus=1", answer["overrides"]["largest"], f"run.dir={tmp_path}/fits")
    assert trained.code == 0, trained.err
    words = ("trainer.gpus=1", f"trainer.micro_batch_size={2 * largest}", f"run.dir={tmp_path}/larger")
    assert limited(ddpexp, *LENET, *words).code == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_fit_has_the_weights_of_one_with_that_micro_batch_typed(ddpexp: Ddpexp, tmp_path: Path) -> None:
    words = (*SMALL, "trainer.gpus=2", "trainer.global_batch_size=12")
    fitted = ddpexp(*words, "trainer.micro_batch_size=fit", f"run.dir={tmp_path}/fitted")
    assert fitted.code == 0, fitted.err
    manifest = json.loads((tmp_path / "fitted/manifest.json").read_text())
    assert manifest["resolved"]["trainer.micro_batch_size"] == 6
    assert "trainer.micro_batch_size=6, found by the first start" in fitted.out
    typed = ddpexp(*words, "trainer.micro_batch_size=6", f"run.dir={tmp_path}/typed")
    assert typed.code == 0, typed.err
    hashes = [
        json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"] for name in ("fitted", "typed")
    ]
    assert hashes[0] == hashes[1]
    longer = ddpexp("resume", f"{tmp_path}/fitted", "trainer.max_steps=12", "trainer.gpus=1")
    assert longer.code == 0, longer.err
    assert "micro-batch 6 x 2 accumulation steps x 1 rank" in longer.out
    assert "finding" not in longer.err  # it is kept
    other = ddpexp("resume", f"{tmp_path}/fitted", "trainer.max_steps=14", "trainer.gpus=3")
    assert other.code == 0, other.err
    assert "was 6 so far, which these workers cannot have" in other.err
    assert "micro-batch 4 x 1 accumulation step x 3 ranks" in other.out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learning_rate_is_found_by_several_workers_and_drawn(ddpexp: Ddpexp, tmp_path: Path) -> None:
    words = (*SMALL, "trainer.global_batch_size=32", "trainer.gpus=2", "strategy=ddp", f"run.dir={tmp_path}/run")
    found = ddpexp("find", "lr", *words, "--json", "--steps=60", "--high=1e6", f"--output={tmp_path}/lr.png")
    assert found.code == 0, found.err
    answer = json.loads(found.out)
    assert 1e-4 < answer["suggestion"] < 10
    assert answer["diverged_after"] is not None
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_cannot_be_found_is_said(ddpexp: Ddpexp) -> None:
    for words, said in {
        ("what", "recipe=mnist"): "find what is nothing that can be found",
        ("batch_size", *SMALL, "trainer.global_batch_size=9", "trainer.gpus=2"): "does not split over 2 workers",
        ("batch_size", *SMALL, "data.batch_tokens=10", "data.lengths=x"): "data.batch_tokens=10",
    }.items():
        done = ddpexp("find", *words)
        assert done.code == 2
        assert said in done.err
        assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_least_of_what_fits_on_two_hosts_is_taken(ddpexp: Ddpexp, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-u", "true"], capture_output=True).returncode:
        pytest.skip("only root may give a command another host name")
    words = (
        *LENET, "trainer.gpus=1", "trainer.nodes=2", "launcher.master_addr=127.0.0.1",
        f"launcher.master_port={free_port()}", "trainer.micro_batch_size=fit", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    smaller = f'hostname smaller && ulimit -d {MEMORY_KIB - 200_000} && exec "$0" "$@"'
    hosts = {"0": ["env"], "1": ["unshare", "-u", "bash", "-c", smaller]}
    processes = [
        subprocess.Popen(
            [*before, sys.executable, "-m", "ddpexp", *words, f"launcher.node_rank={rank}"],
            cwd=ddpexp.folder, env=ddpexp.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank, before in hosts.items()
    ]  # fmt: skip
    first, second = (finish(process, tmp_path / "run", PATIENCE) for process in processes)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    on_second = json.loads((tmp_path / "run/ranks/fit-smaller.json").read_text())["size"]
    assert on_second < 4096  # what fits on the first
    assert json.loads((tmp_path / "run/manifest.json").read_text())["resolved"]["trainer.micro_batch_size"] == on_second
    assert f"micro-batch {on_second:,} x" in first.out
