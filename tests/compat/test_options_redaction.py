"""Secrets in a stored command line."""

import pytest

from rsup.launcher.launch_options import LaunchOptions, job_spec
from rsup.launcher.redaction import redact_command
from rsup.supervisor.wire import encode


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--token abc", "--token ***"),
        ("--hf_token -xyz1", "--hf_token ***"),
        ("--api-key=xyz", "--api-key=***"),
        ("--apiKey=xyz", "--apiKey=***"),
        ("KEY=xyz", "KEY=***"),
        ("WANDB_API_KEY=xyz", "WANDB_API_KEY=***"),
        ("hydra.db_password_old=xyz", "hydra.db_password_old=***"),
        ("--password --lr 3", "--password --lr 3"),
        ("--auth=", "--auth="),
        ("https://user:pass@host/x", "https://user:***@host/x"),
        ("--db postgresql://u:p%40q@h:5/db", "--db postgresql://u:***@h:5/db"),
        ("https://0123456789abcdef0123@host/x", "https://***@host/x"),
        ("https://h/x?a=1&X-Amz-Signature=zz&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("hf_" + "a" * 30, "***"),
        ("x=ghp_" + "a" * 36, "x=***"),
        ("AKIA" + "A" * 16, "***"),
    ],
)
def test_secrets_are_hidden(words: str, shown: str) -> None:
    assert redact_command(words.split()) == shown.split()


@pytest.mark.parametrize(
    "words",
    [
        "train.py --lr 3 --tokenizer gpt2 --max-tokens 5 --num_token 3 --eos-token </s>",
        "--monkey 4 --keyboard us --author me --path /a/b --pattern x",
        "s3://bucket/key user@host:/x --data http://h/x?page=2 --step:3",
        "--key-dim 64 --keys-per-step 3 --turnkeys=4",
    ],
)
def test_the_rest_is_verbatim(words: str) -> None:
    assert redact_command(words.split()) == words.split()


def test_bearer_in_one_word() -> None:
    assert redact_command(["--header", "X: Bearer abc.def"]) == ["--header", "X: Bearer ***"]


def test_the_job_spec_holds_no_secret_and_the_ranks_get_it() -> None:
    options = LaunchOptions("pkg.mod", ("--token", "abc", "KEY=v"), module=True)
    assert job_spec(options, "me").command == ["-m", "pkg.mod", "--token", "***", "KEY=***"]
    assert options.training_script_args == ("--token", "abc", "KEY=v")


def test_any_command_can_be_sent_and_stored() -> None:
    options = LaunchOptions("s.py", ("\udcff", "x" * 10_000, *["w"] * 3000), rdzv_id="a\udcff", role="\udcff")
    spec = job_spec(options, "me")
    assert spec.command[1] == "\\udcff" and len(spec.command[2]) == 2003 and spec.command[-1] == "... and 2003 more"
    assert len(encode(spec)) < 10_000
