"""Notifications of whole jobs on this computer: a machine is lost and comes back, the job is stopped and resumed."""

from collections.abc import Iterator

import pytest
from support.sandbox import Sandbox
from support.webhook_server import WebhookServer, webhook_server


@pytest.fixture
def webhook() -> Iterator[WebhookServer]:
    with webhook_server() as server:
        yield server


def test_loss_return_and_end_of_a_job_are_told_once_and_the_url_is_in_one_file(
    sandbox: Sandbox, webhook: WebhookServer
) -> None:
    (sandbox.path / "home/.config/imgnet-cluster").mkdir(parents=True)
    (sandbox.path / "home/.config/imgnet-cluster/config.toml").write_text(f'notify = "{webhook.url}"\n')
    launch = sandbox.cli("launch", "--local", "--machines", "2", "-d", sandbox.write_recipe(4000))
    assert launch.code == 0, launch.err
    job = sandbox.job()
    sandbox.wait_for(lambda: (job.status().step or 0) > 2)
    assert webhook.events == []
    assert sandbox.cli("rehearse-loss", "--machine", "1").code == 0
    sandbox.wait_for(lambda: webhook.events == ["machine_lost", "machine_back"])
    assert [notification["machines"] for notification in webhook.posted] == [["1"], ["1"]]
    assert sandbox.cli("stop").code == 0
    sandbox.wait_for(lambda: webhook.events[2:] == ["stopped"])
    resume = sandbox.cli("resume", "--dry-run", "--notify", "touch told")
    assert f"--notify: {webhook.label} -> touch ...\n" in resume.out, resume.out + resume.err
    resume = sandbox.cli("resume", "-d", "--notify", f"touch {sandbox.path}/told")
    assert resume.code == 0, resume.err
    sandbox.wait_for(lambda: job.state == "running")
    assert not (sandbox.path / "told").exists()
    assert sandbox.cli("stop").code == 0
    sandbox.wait_for((sandbox.path / "told").exists)
    assert webhook.events == ["machine_lost", "machine_back", "stopped"]
    shown = "".join(sandbox.cli(*words).out for words in (("status",), ("config",), ("launch", "--help")))
    assert webhook.label in shown and "s3cr3t" not in shown
    leaks = [path for path in job.path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert leaks == []
