"""Token files: made once, private, and refused when they are wrong."""

import hashlib
import os
from pathlib import Path

import pytest

from rsup.supervisor import node_tokens
from rsup.supervisor.principals import Principal, Role, WatchedTokens, make_token, owner_name, read_tokens
from rsup.supervisor.wire import RsupError

DIGEST = hashlib.sha256(b"anns-token-0123456789").hexdigest()


def test_the_owners_token_is_made_once_and_private(state: Path) -> None:
    token = make_token(state)
    assert len(token) >= 32 and make_token(state) == token
    assert (state / "token").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.iterdir()] == ["token"]
    book = read_tokens(state)
    assert book.find(token) == Principal(owner_name(), Role.OPERATOR)
    assert book.find(token + "x") is None and book.find("") is None


def test_a_shared_supervisor_knows_others_by_their_hashes(state: Path) -> None:
    (state / "tokens.toml").write_text(f'[[token]]\nname = "ann"\nrole = "user"\nsha256 = "{DIGEST}"\n')
    principal = read_tokens(state).find("anns-token-0123456789")
    assert principal == Principal("ann", Role.USER)
    assert principal is not None and principal.may_read("ann") and not principal.may_read("bob")
    assert not Principal("ann", Role.VIEWER).may_read("ann") and Principal("x", Role.OPERATOR).may_read("ann")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[token]", "no TOML"),
        ("x = 1", "only [[token]]"),
        ("token = 3", "only [[token]]"),
        ('[[token]]\nname = "a"', "entry 1"),
        (f'[[token]]\nname = "a"\nrole = "god"\nsha256 = "{DIGEST}"', "viewer, user, operator"),
        ('[[token]]\nname = "a"\nrole = "user"\nsha256 = "12"', "64 hexadecimal"),
        (f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{DIGEST}"\n' * 2, "entry 2 of the token list"),
        (f'[[token]]\nname = ""\nrole = "user"\nsha256 = "{DIGEST}"', "needs a name"),
    ],
)
def test_a_wrong_token_list_is_named(state: Path, text: str, complaint: str) -> None:
    (state / "tokens.toml").write_text(text)
    with pytest.raises(RsupError) as caught:
        read_tokens(state)
    assert complaint in str(caught.value) and "tokens.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_tokens_are_read_anew_when_their_files_have_changed(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    owners, ann = make_token(state), "anns-token-0123456789"
    watched = WatchedTokens(state, clock=lambda: now_s)
    listed = f'[[token]]\nname = "ann"\nrole = "user"\nsha256 = "{DIGEST}"\n'
    for text, knows_ann, complains in (
        ("", False, False),
        (listed, True, False),
        ("[[tok", True, True),
        ("# none\n", False, False),
    ):
        (state / "tokens.toml").write_text(text)
        now_s += 1.0
        caplog.clear()
        for _ in range(2):
            assert (watched.find(ann) is not None) is knows_ann and watched.find(owners) is not None
        assert ("tokens stay as they were" in caplog.text) is complains and len(caplog.records) == complains
    (state / "tokens.toml").write_text(listed)
    assert watched.find(ann) is None, "looked for once a second"


def test_files_that_others_may_touch_are_refused(state: Path) -> None:
    make_token(state)
    (state / "token").chmod(0o640)
    with pytest.raises(RsupError, match="chmod 600"):
        read_tokens(state)
    (state / "token").unlink()
    (state / "tokens.toml").write_text("")
    (state / "tokens.toml").chmod(0o666)
    with pytest.raises(RsupError, match="chmod go-w"):
        read_tokens(state)


def test_a_short_or_binary_token_is_refused(state: Path) -> None:
    for content in (b"short", b"\xff" * 40, "é".encode() * 20):
        (state / "token").write_bytes(content)
        os.chmod(state / "token", 0o600)
        with pytest.raises(RsupError, match="token file"):
            read_tokens(state)


def test_a_nodes_token_speaks_for_that_node_only(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert node_tokens.main(["--state-dir", str(state), "n1"]) == 1, "no supervisor has been here"
    told = capsys.readouterr()
    assert told.out == "" and "would be worth nothing" in told.err and not (state / "node-secret").exists()
    node_tokens.make_secret(state)
    assert node_tokens.main(["--state-dir", str(state), "n[1-3]", "n4"]) == 0
    assert [line.split(".")[1] for line in capsys.readouterr().out.split()] == ["n1", "n2", "n3", "n4"]
    assert node_tokens.main(["--state-dir", str(state), "n[1-"]) == 2 and "list of nodes" in capsys.readouterr().err
    assert node_tokens.main(["--state-dir", str(state), "n1", "gpu-3.cluster"]) == 0
    first, second = capsys.readouterr().out.split()
    assert (state / "node-secret").stat().st_mode & 0o777 == 0o600
    node = read_tokens(state).find(first)
    assert node is not None and node.role is Role.NODE and node.may_report_for("n1")
    assert (
        not node.may_report_for("n2")
        and not node.may_report_for("")
        and not node.may_read("n1")
        and not node.may_read(node.name)
    )
    dotted = read_tokens(state).find(second)
    assert dotted is not None and dotted.node == "gpu-3.cluster"
    for forged in (
        first[:-1] + ("0" if first[-1] != "0" else "1"),
        first.replace("n1", "n2"),
        "node.n1.",
        "node.n1",
        "node..x",
        "",
    ):
        assert read_tokens(state).find(forged) is None
    assert Principal("x", Role.OPERATOR).may_report_for("n1") and not Principal("n1", Role.USER).may_report_for("n1")
    assert node_tokens.main(["--state-dir", str(state), "bad name"]) == 2 and "node name" in capsys.readouterr().err
    (state / "node-secret").chmod(0o644)
    assert node_tokens.main(["--state-dir", str(state), "n1"]) == 1 and "chmod 600" in capsys.readouterr().err
