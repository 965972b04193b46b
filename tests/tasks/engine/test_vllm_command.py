"""What of a managed server's settings decides its answers."""

from __future__ import annotations

from pathlib import Path

from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.engine.vllm_command import answering


def suffix(*args: str, dtype: str = "auto") -> str:
    return answering(VllmEngine(args=args, dtype=dtype))


def test_where_and_how_fast_is_no_part_of_what_a_model_is() -> None:
    assert suffix() == ""
    assert (
        suffix("--tensor-parallel-size", "4", "--gpu_memory_utilization=0.8", "--enforce-eager", "-tp", "2")
        == ""
    )


def test_what_changes_answers_is() -> None:
    assert suffix(dtype="float32") == " dtype:float32"
    fp8 = suffix("--quantization", "fp8", "--tensor-parallel-size", "4")
    assert fp8.startswith(" args:")
    assert fp8 == suffix("--tensor-parallel-size=2", "--quantization=fp8")
    assert len({fp8, suffix("--quantization", "awq"), suffix("--unheard-of"), suffix()}) == 4


def test_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    one.write_text("{{ messages }}")
    other.write_text("{{ messages }}")
    before = suffix("--chat-template", str(one))
    assert suffix(f"--chat-template={other}") == before
    one.write_text("{{ messages[0] }}")
    assert suffix("--chat-template", str(one)) != before
