"""Every option that a graph forbids is refused with a line that names it and the remedy, and nothing else is."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rsup.worker.cuda_graph.constraints import CONSTRAINTS, GraphFacts, check_constraints, facts_of_environment, violations
from rsup.worker.cuda_graph.contract import ConstraintError
from rsup.worker.cuda_graph.live_constraints import LIVE_CONSTRAINTS
from tests.worker.graph_constraint_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_violation_names_the_option_and_its_remedy_and_the_remedy_helps(case: Case) -> None:
    beginning, facts, remedy, cured = case
    with pytest.raises(ConstraintError) as raised:
        check_constraints(GraphFacts(**facts))
    text = str(raised.value)
    assert text.startswith(beginning) and "does not go with a CUDA graph: " in text
    assert remedy in text.rpartition("; ")[2] and "\n" not in text
    assert raised.value.exit_code == 2
    check_constraints(GraphFacts(**{**facts, **cured}))


def test_every_row_of_the_table_has_a_case() -> None:
    for rule in CONSTRAINTS:
        assert any(case[0].startswith(rule.option) for case in CASES), rule.option


def test_what_a_graph_takes_passes() -> None:
    check_constraints(GraphFacts())
    check_constraints(
        GraphFacts(cpu_offloading=True, recompute_granularity="full", optimizer_cuda_graph=True, inprocess_restart=True)
    )
    check_constraints(GraphFacts(attention_dropout=0.1, hidden_dropout=0.1))  # nothing is computed again
    check_constraints(GraphFacts(hidden_dropout=0.1, recompute_granularity="selective"))  # core_attn draws none of it
    check_constraints(GraphFacts(fp16=True, loss_scale=512.0, state_moves=True, num_model_chunks=4))
    check_constraints(GraphFacts(optimizer="sgd", log_num_zeros_in_grad=True))  # the optimizer is in no graph


def test_without_a_graph_nothing_is_forbidden() -> None:
    everything: dict[str, Any] = {name: value for case in CASES for name, value in case[1].items()} | {
        "cuda_graph_impl": "full_iteration"
    }
    assert len(violations(GraphFacts(**everything))) > 15
    assert violations(GraphFacts(**{**everything, "cuda_graph_impl": "none", "optimizer_cuda_graph": False})) == []


def test_violations_of_one_cause_are_one_line() -> None:
    """Without own code: only what options can do, and which values nobody gave."""
    facts = GraphFacts(
        recompute_granularity="full",
        attention_dropout=0.1,
        hidden_dropout=0.2,
        at_default=frozenset({"--attention-dropout"}),
        in_own_code=False,
    )
    (line,) = violations(facts)
    assert line.startswith("--attention-dropout 0.1 (the default) and --hidden-dropout 0.2 do not go with a CUDA graph: ")
    assert line.endswith("; use --attention-dropout 0 and --hidden-dropout 0, or leave out --recompute-granularity")


def test_several_violations_are_counted() -> None:
    with pytest.raises(ConstraintError, match=r"^--hybrid-context-parallel .* \(2 more after that\)$"):
        check_constraints(GraphFacts(hybrid_context_parallel=True, fp16=True, log_straggler=True))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (False, True, False)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, (True, True, False)),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true", "NCCL_GRAPH_REGISTER": "0"}, (True, False, False)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "NCCL_GRAPH_REGISTER": "1"}, (False, True, False)),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, (False, True, True)),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0", "PYTORCH_CUDA_ALLOC_CONF": ""}, (False, True, False)),
    ],
)
def test_facts_of_the_environment(environment: dict[str, str], expected: tuple[bool, bool, bool]) -> None:
    facts = facts_of_environment(environment)
    variable = facts.pop("allocator_variable")
    assert (facts["expandable_segments"], facts["nccl_graph_register"], facts["nccl_blocking_wait"]) == expected
    assert len(facts) == 3 and "expandable_segments:true" not in str({**environment, variable: ""}).lower()


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_variable_that_is_set_is_named(variable: str) -> None:
    facts = GraphFacts(**facts_of_environment({variable: "expandable_segments:true"}))
    assert violations(facts)[0].startswith(f"expandable_segments:True in {variable} does not go with")


def test_options_are_judged_without_torch() -> None:
    script = "import rsup.worker.cuda_graph.constraints, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_document_shows_both_tables() -> None:
    text = (Path(__file__).parents[2] / "docs/cuda_graph.md").read_text()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line.startswith("|")]
    shown = {tuple(re.sub(r"[`\\]", "", cell) for cell in row) for row in rows}
    for rule in (*CONSTRAINTS, *LIVE_CONSTRAINTS):
        assert (rule.option, rule.why, getattr(rule, "remedies", rule.remedy)) in shown, rule.option
