"""Fingerprints: what changes rows changes them, and nothing else does."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gradeloom.flows.recipe import Recipe, graded_recipe
from gradeloom.schemas.config import DecontaminateFilter, GradedConfig
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.filter.decontaminate import Contamination

STAGES = ["source", "generate", "filter", "near_duplicates", "judge", "label"]


class Made:
    """Recipes of one configuration, changed here and there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("queries.tsv", "q1\twhy is the sky blue\n")

    def write(self, name: str, text: str) -> str:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    def prompt(self, name: str, file: str, *, called: str | None = None, more: str = "") -> str:
        """A copy of a prompt that comes with gradeloom."""
        text = (files("gradeloom.data") / "prompts" / f"{name}.yaml").read_text()
        text = text.replace(f"name: {name}\n", f"name: {called or name}\n")
        return self.write(file, text.replace("system: |", f"system: |\n  {more}", 1) if more else text)

    def __call__(self, *, identities: tuple[str, str] = ("fault:0", "fault:1"), **changes: Any) -> Recipe:
        settings: dict[str, Any] = {
            "source": {"path": str(self.folder / "queries.tsv")},
            "engine": {"kind": "fault"},
            "judge": {"engine": {"kind": "fault", "seed": 1}},
            "release": {"name": "tale"},
        }
        for section, change in changes.items():
            merge = isinstance(change, dict) and "kind" not in change
            settings[section] = {**settings.get(section, {}), **change} if merge else change
        config = GradedConfig.model_validate(settings)
        sets = [f for f in config.filters if isinstance(f, DecontaminateFilter)]
        contamination = Contamination.load(sets[0]) if sets else None
        return graded_recipe(
            config, generator=identities[0], judge=identities[1], contamination=contamination
        )

    def changed(self, **changes: Any) -> list[str]:
        """Stages that a change gives another fingerprint."""
        before, after = self(), self(**changes)
        return [s for s in STAGES if before.fingerprints[s] != after.fingerprints[s]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ("generate", {"generation": {"temperature": 0.1}}),
        ("generate", {"generation": {"examples_shown": 2}}),
        ("generate", {"run": {"seed": 5}}),
        ("generate", {"identities": ("fault:2", "fault:1")}),
        ("generate", {"levels": [{"grade": g, "name": "n", "definition": "d"} for g in (2, 0)]}),
        ("filter", {"filters": [{"kind": "length"}, {"kind": "near_duplicates"}]}),
        ("near_duplicates", {"filters": [
            *({"kind": k} for k in ("structure", "length", "refusal", "query_copied", "siblings")),
            {"kind": "near_duplicates", "threshold": 0.7}]}),
        ("judge", {"judge": {"min_mass": 0.9}}),
        ("judge", {"judge": {"pairwise": True}}),
        ("judge", {"identities": ("fault:0", "fault:3")}),
        ("label", {"label": {"policy": "expected"}}),
    ],
)  # fmt: skip
def test_a_change_is_one_of_its_stage_and_of_all_after_it(
    first: str, change: dict[str, Any], made: Made
) -> None:
    assert made.changed(**change) == STAGES[STAGES.index(first) :]


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"root": "elsewhere", "shard_rows": 3, "wave": 9, "max_failed": 1.0}},
        {"engine": {"kind": "fault", "window": 3, "latency": 1.0, "transport_retries": 1}},
        {"cache": {"enabled": False}},
        {"release": {"root": "elsewhere"}},
    ],
)
def test_where_and_how_fast_changes_nothing(change: dict[str, Any], made: Made) -> None:
    assert made(**change) == made()


def test_the_release_is_part_of_the_recipe_and_of_no_stage(made: Made) -> None:
    for change in (
        {"release": {"version": "0.2.0"}},
        {"release": {"licence": "mit"}},
        {"release": {"parent": "0.0.1"}},
        {"run": {"limit": 3}},
        {"run": {"target": 3}},
    ):
        assert made.changed(**change) == []
        assert made(**change).digest != made().digest


def test_prompts_examples_and_evaluation_sets_count_by_what_they_hold(made: Made) -> None:
    sky = {"query": "a", "passages": {str(g): f"text {g}" for g in range(4)}}
    one, same = made.write("one.jsonl", json.dumps(sky)), made.write("b/two.jsonl", json.dumps(sky) + "\n\n")
    other = made.write("other.jsonl", json.dumps(sky | {"query": "b"}))
    places = [made.prompt("graded_list", "p.yaml"), made.prompt("graded_list", "moved/p.yaml")]
    stern = made.prompt("graded_list", "stern/p.yaml", more="Be stern.")

    def recipe(prompt: str, examples: str) -> Recipe:
        decontaminate = {"kind": "decontaminate", "sets": {"set": examples}}
        return made(generation={"prompt": prompt, "examples": examples}, filters=[decontaminate])

    assert recipe(places[0], one) == recipe(places[1], same)
    prints = [recipe(p, e).fingerprints for p, e in ((places[0], one), (stern, one), (places[0], other))]
    assert len({p["generate"] for p in prints}) == 3
    assert len({p["filter"] for p in prints}) == 3


def test_the_pairwise_prompt_does_not_hide_a_change_of_the_judges(made: Made) -> None:
    pair = made.prompt("judge_pair", "pair.yaml", called="mine")
    mild = made.prompt("judge", "mild.yaml", called="mine")
    with pytest.raises(InputError, match=r"pair\.yaml, field 'name': another prompt .* 'mine'"):
        made(judge={"prompt": mild, "pairwise": True, "pairwise_prompt": pair})
    prints = set()
    for more in ("", "Be stern."):
        judge = made.prompt("judge", "judge.yaml", called="judge", more=more)
        prints.add(made(judge={"prompt": judge, "pairwise": True, "pairwise_prompt": pair}).digest)
    assert len(prints) == 2


def test_a_tokenizer_counts_by_what_it_holds(made: Made) -> None:
    for folder, text in (("one", "{}"), ("moved/one", "{}"), ("other", '{"a": 1}')):
        made.write(f"{folder}/tokenizer.json", text)

    def recipe(folder: str) -> Recipe:
        engine = {"kind": "openai", "model": "m", "endpoints": ["http://h/v1"], "max_model_len": 512}
        return made(engine={**engine, "tokenizer": str(made.folder / folder)})

    assert recipe("one") == recipe("moved/one")
    assert recipe("one").fingerprints["generate"] != recipe("other").fingerprints["generate"]


def test_a_manifest_does_not_say_where_things_lie(made: Made) -> None:
    for folder in ("a", "b"):
        made.write(f"{folder}/tokens/tokenizer.json", "{}")
        made.prompt("judge", f"{folder}/judge.yaml")

    def recipe(folder: str) -> Recipe:
        home = made.folder / folder
        vllm = {"kind": "vllm", "tokenizer": str(home / "tokens")}
        return made(
            identities=("sha256:1", "sha256:2"),
            engine={**vllm, "model": str(home / "writer")},
            judge={"engine": {**vllm, "model": str(home / "reader")}, "prompt": str(home / "judge.yaml")},
        )

    assert recipe("a") == recipe("b")
    assert str(made.folder) not in json.dumps(recipe("a").config)
    assert [model.model for model in recipe("a").models] == ["writer", "reader"]


OPENAI = {"kind": "openai", "model": "org/m", "endpoints": ["http://h/v1"]}


@pytest.mark.parametrize(
    ("engine", "judge", "identities", "independent"),
    [
        ({"kind": "fault"}, {"kind": "fault", "seed": 1}, ("fault:0", "fault:1"), True),
        ({"kind": "fault"}, {"kind": "fault", "window": 5}, ("fault:0", "fault:0"), False),
        ({"kind": "vllm"}, {"kind": "vllm", "model": "/m"}, ("sha256:1 dtype:half", "sha256:1"), False),
        ({"kind": "vllm", "model": "org/m"}, OPENAI, ("hub:org/m@c", "openai:org/m@"), False),
        (OPENAI, {**OPENAI, "revision": "2"}, ("openai:org/m@", "openai:org/m@2"), False),
        (OPENAI, {**OPENAI, "model": "org/n"}, ("openai:org/m@", "openai:org/n@"), True),
    ],
)
def test_a_judge_is_independent_when_it_is_another_model(
    engine: dict[str, Any],
    judge: dict[str, Any],
    identities: tuple[str, str],
    independent: bool,
    made: Made,
) -> None:
    recipe = made(identities=identities, engine=engine, judge={"engine": judge})
    assert recipe.judge_independent is independent
    assert recipe.policy == ("agreed" if independent else "intended")
