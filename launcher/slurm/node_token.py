"""Whether a token is one that a node should have: by its form, since only the supervisor knows the secret. Pure."""

import re
import stat

_FORM = re.compile(r"node\.(.+)\.[0-9a-f]+")
"""What `rsup slurm node-token NAME` prints."""


def token_problem(token: str, mode: int, node: str) -> str:
    """What is wrong with the token file of `node`, empty for nothing. `mode`: of the file."""
    form = _FORM.fullmatch(token)
    if form is None:
        return (
            "holds no node's token (an operator's may do too much to lie on a node): put what `rsup slurm node-token "
            f"{node}` prints on the supervisor's host there"
        )
    if form[1] != node:
        return f"holds the token of node {form[1][:60]}, this is {node}: put what `rsup slurm node-token {node}` prints there"
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return "can be read by others; chmod 600 it"
    return ""
