"""Configurations: what is read, and how each mistake is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.flows import configure
from gradeloom.flows.configure import load_config, packaged_configs
from gradeloom.schemas.config import (
    FaultEngine,
    GradedConfig,
    LengthFilter,
    OpenAIEngine,
    ReplayEngine,
    VllmEngine,
)
from gradeloom.schemas.errors import InputError

SMALL = """\
source: {path: queries.jsonl}
engine: {kind: fault, seed: 7}
release: {name: small}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one query file; configurations lie in `configs/`."""
    monkeypatch.delenv("GRADELOOM_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queries.jsonl").write_text('{"_id": "1", "text": "why is the sky blue"}\n')
    (tmp_path / "configs").mkdir()
    return tmp_path


def write(folder: Path, text: str) -> str:
    file = folder / "configs" / "c.yaml"
    file.write_text(text)
    return str(file)


def refused(folder: Path, text: str, *sets: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(write(folder, text), sets)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(folder), "~")


def test_a_file_becomes_a_config(folder: Path) -> None:
    config = load_config(write(folder, SMALL))
    assert config.engine == FaultEngine(seed=7)
    assert config.release.name == "small"
    assert config.filters == GradedConfig.model_fields["filters"].default


def test_limit_is_run_limit(folder: Path) -> None:
    assert load_config(write(folder, SMALL), limit=3).run.limit == 3


# --- --set ----------------------------------------------------------------------------------


def test_set_values_are_yaml(folder: Path) -> None:
    sets = ["run.shard_rows=5", "judge=null", "label.policy=intended", "generation.shuffle_levels=no",
            "release={name: other, version: 1.2.3}"]  # fmt: skip
    config = load_config(write(folder, SMALL), sets)
    assert config.run.shard_rows == 5
    assert config.judge is None
    assert config.generation.shuffle_levels is False
    assert (config.release.name, config.release.version) == ("other", "1.2.3")


def test_set_reaches_into_defaults_that_the_file_does_not_name(folder: Path) -> None:
    config = load_config(
        write(folder, SMALL),
        ["filters.1.max_words=60", "generation.attributes.length.0.max_words=61", "judge.engine.kind=vllm",
         "run.canary.rows=9"],
    )  # fmt: skip
    assert config.filters[1] == LengthFilter(min_words=10, max_words=60)
    assert [f.kind for f in config.filters][::5] == ["structure", "near_duplicates"]
    assert [b.max_words for b in config.generation.attributes.length] == [61, 110, 180]
    assert config.judge is not None
    assert config.judge.engine == VllmEngine()
    assert config.run.canary is not None
    assert config.run.canary.rows == 9


def test_set_into_the_default_engine_keeps_its_kind(folder: Path) -> None:
    text = "source: {path: queries.jsonl}\nrelease: {name: small}\n"
    assert load_config(write(folder, text), ["engine.window=3"]).engine == VllmEngine(window=3)


def test_a_later_set_wins(folder: Path) -> None:
    assert load_config(write(folder, SMALL), ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.seed", "--set: expected key.subkey=value, got 'run.seed'"),
        ("run..seed=1", "--set: expected key.subkey=value, got 'run..seed'"),
        ("run.seed=[1",
         "--set, field 'run.seed': not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("filters.9.kind=x", "--set, field 'filters.9.kind': expected an index from 0 to 5, got '9'"),
        ("filters.x.kind=x", "--set, field 'filters.x.kind': expected an index from 0 to 5, got 'x'"),
        ("engine.seed.x=1", "--set, field 'engine.seed.x': 'engine.seed' holds no settings"),
        ("run.shard_rows=0", "--set, field 'run.shard_rows': expected greater than or equal to 1, got 0"),
        ("engine.sed=1", "--set, field 'engine.sed': unknown setting, did you mean `engine.seed`?"),
        ("limit=3", "--set, field 'limit': unknown setting, did you mean `run.limit`?"),
    ],
)  # fmt: skip
def test_a_wrong_set_is_said(folder: Path, change: str, message: str) -> None:
    assert refused(folder, SMALL, change) == message


@given(st.integers(0, 10**9), st.sampled_from(["run.seed", "engine.seed"]))
def test_set_is_what_the_file_would_say(number: int, path: str) -> None:
    data: dict[str, dict[str, int]] = {"run": {}, "engine": {}}
    configure._apply(GradedConfig, data, f"{path}={number}")
    group, name = path.split(".")
    assert data[group] == {name: number}


# --- mistakes in a file -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL + "run: {sead: 1}\n", "field 'run.sead': unknown setting, did you mean `run.seed`?"),
        (SMALL + "judge: {engine: {kind: vllm, windw: 1}}\n",
         "field 'judge.engine.windw': unknown setting, did you mean `judge.engine.window`?"),
        (SMALL + "filters: [{kind: length, maxwords: 3}]\n",
         "field 'filters.0.maxwords': unknown setting, did you mean `filters.0.max_words`?"),
        (SMALL + "run: {shard_rows: many}\n",
         "field 'run.shard_rows': expected a valid integer, unable to parse string as an integer, "
         'got "many"'),
        (SMALL + "run: {max_failed: 2}\n", "field 'run.max_failed': expected less than or equal to 1, got 2"),
        (SMALL + "filters: [{kind: lenght}]\n",
         "field 'filters.0': unknown kind 'lenght', expected one of 'structure', 'length', 'refusal', "
         "'query_copied', 'siblings', 'decontaminate', 'near_duplicates'"),
        (SMALL.replace("kind: fault, ", ""),
         "field 'engine': expected `kind`: one of vllm, openai, replay, fault"),
        (SMALL.replace("release: {name: small}", ""), "field 'release': is missing and has no default"),
        (SMALL + "filters: [{kind: near_duplicates}, {kind: length}]\n",
         "filters: near_duplicates sees the whole data set and must be the last"),
        (SMALL.replace("name: small", "name: small, parent: latest"),
         "field 'release.parent': a version is MAJOR.MINOR.PATCH, e.g. 0.1.0"),
        (SMALL + "run: {seed: 1, limit: 0}\nlabel: {policy: best}\n",
         "field 'label.policy': expected 'intended', 'judged', 'agreed' or 'expected', "
         'got "best" (and 1 more)'),
        (SMALL + "run: 5\n", "field 'run': expected settings (key: value), got 5"),
        (SMALL + "filters: 5\n", "field 'filters': expected a list, got 5"),
        (SMALL + "levels: [{grade: 1, name: a, definition: b}]\n",
         "field 'levels': expected at least 2 of them, got 1"),
        (SMALL + "levels: [{grade: 1, name: '', definition: b}, {grade: 0, name: a, definition: c},"
         " {grade: 2, name: d, definition: e}]\n",
         "field 'levels.0.name': expected some text"),
        (SMALL + "filters: [{kind: length, min_words: 9, max_words: 3}]\n",
         "field 'filters.0': min_words is greater than max_words"),
        (SMALL + "run: {seed: 99999999999999999999}\n",
         "field 'run.seed': expected a number that fits into 64 bits"),
        (SMALL + 'run: {root: "a\\0b"}\n', "field 'run.root': holds the control character U+0000"),
        (SMALL + "run: {root: ''}\n", "field 'run.root': expected some text"),
        (SMALL.replace("seed: 7", "latency: .inf"),
         "field 'engine.latency': expected a finite number, got Infinity"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_said(folder: Path, text: str, message: str) -> None:
    said = refused(folder, text)
    assert said.startswith("~/configs/c.yaml")
    assert said.removeprefix("~/configs/c.yaml").lstrip(",: ") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "row 3: not valid YAML: 'a' is given twice (first in line 1)"),
        ("run:\n  seed: 1\n  seed: 1\n", "row 3: not valid YAML: 'seed' is given twice (first in line 2)"),
        ("a: [1\nb: 2\n", "row 2: not valid YAML: "),
        ("- a\n", "expected a mapping of settings (key: value)"),
        ("a: !!python/object/apply:os.system [ls]\n",
         "row 1: not valid YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_bad_yaml_is_said_with_its_line(folder: Path, text: str, message: str) -> None:
    assert refused(folder, text).removeprefix("~/configs/c.yaml").lstrip(",: ").startswith(message)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 2024-13-45", "a value that is no timestamp; text wants quotes"),
        ("name: !!timestamp soon", "a value that is no timestamp; text wants quotes"),
        ("name: !!int many", "a value that is no int; text wants quotes"),
        ("name: !!bool maybe", "a value that is no bool; text wants quotes"),
        ("name: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        (BOMB, "aliases make more than 100,000 values of it, or go round in circles"),
        ("&a [*a]", "aliases make more than 100,000 values of it, or go round in circles"),
    ],
    ids=["date", "timestamp", "int", "bool", "deep", "bomb", "circle"],
)
def test_yaml_that_plain_loaders_choke_on(folder: Path, text: str, message: str) -> None:
    assert message in refused(folder, text)


@pytest.mark.parametrize("url", ["http://", "http:///v1", "unix:", "http://[::1/v1", "http://h:99999/v1",
                                 "http://two words/v1"])  # fmt: skip
def test_an_endpoint_that_leads_nowhere_is_refused(folder: Path, url: str) -> None:
    said = refused(folder, SMALL, f"engine={{kind: openai, model: m, endpoints: ['{url}']}}")
    assert "field 'engine.endpoints'" in said
    assert "names no host or socket" in said


def test_merge_keys_may_be_overridden(folder: Path) -> None:
    text = SMALL.replace("engine: {kind: fault, seed: 7}", "engine: &e {kind: fault, seed: 7}")
    config = load_config(write(folder, text + "judge: {engine: {<<: *e, seed: 8}}\n"))
    assert config.judge is not None
    assert config.judge.engine == FaultEngine(seed=8)


def test_an_unknown_name_lists_what_there_is(folder: Path) -> None:
    with pytest.raises(InputError, match="one of graded-demo, graded-msmarco, graded-recorded"):
        load_config("graded-dmeo")


# --- secrets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("engine.log=sk-abcdefghijklmnopqrstuv", "engine.log"),
        ("engine={kind: vllm, env: {HF_TOKEN: abcdef}}", "engine.env.HF_TOKEN"),
        ("engine={kind: vllm, env: {X: hf_abcdefghijklmnopqrst}}", "engine.env.X"),
        ("engine={kind: vllm, args: [--api-key, abc]}", "engine.args.0"),
        ("engine={kind: vllm, args: ['--api-key=abc']}", "engine.args.0"),
        ("engine={kind: openai, model: m, endpoints: ['http://me:pw@host/v1']}", "engine.endpoints.0"),
        ("engine={kind: openai, model: m, endpoints: ['http://h/v1'], api_key: abc}", "engine.api_key"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(folder: Path, change: str, field: str) -> None:
    said = refused(folder, SMALL, change)
    assert f"field '{field}': looks like a key or password" in said
    for secret in ("sk-abc", "abcdef", "hf_abc", "me:pw"):
        assert secret not in said


def test_the_name_of_a_key_is_no_secret(folder: Path) -> None:
    change = "engine={kind: openai, model: m, endpoints: ['http://h/v1'], api_key_env: MY_API_KEY}"
    engine = load_config(write(folder, SMALL), [change, "run.budget_tokens=10"]).engine
    assert isinstance(engine, OpenAIEngine)
    assert engine.api_key_env == "MY_API_KEY"


# --- paths ----------------------------------------------------------------------------------


def test_input_paths_are_looked_for_here_then_beside_the_file(folder: Path) -> None:
    (folder / "configs" / "beside.jsonl").write_text("")
    (folder / "configs" / "queries.jsonl").write_text("")
    (folder / "eval").mkdir()
    text = SMALL + (
        "generation: {examples: beside.jsonl}\n"
        "judge: {engine: {kind: replay, path: beside.jsonl, adapter: judgements}}\n"
        "filters: [{kind: decontaminate, sets: {dl19: eval}}]\n"
    )
    config = load_config(write(folder, text))
    assert config.source.path == str(folder / "queries.jsonl")
    assert config.generation.examples == str(folder / "configs" / "beside.jsonl")
    assert config.judge is not None
    assert isinstance(config.judge.engine, ReplayEngine)
    assert config.judge.engine.path == str(folder / "configs" / "beside.jsonl")
    assert config.filters[0].model_dump()["sets"] == {"dl19": str(folder / "eval")}
    assert (config.run.root, config.release.root) == ("runs", "releases")


def test_a_missing_input_says_where_it_was_looked_for(folder: Path) -> None:
    said = refused(folder, SMALL, "source.path=nope.jsonl")
    assert said == (
        "~/configs/c.yaml, field 'source.path': no such file or folder: 'nope.jsonl' "
        "(looked in ~ and ~/configs)"
    )


def test_gradeloom_home_moves_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(folder, SMALL)
    assert load_config(file).cache.root == ".gradeloom/cache"
    monkeypatch.setenv("GRADELOOM_HOME", "/elsewhere")
    assert load_config(file).cache.root == "/elsewhere/cache"
    assert load_config(file, ["cache.root=mine"]).cache.root == "mine"


# --- what comes with gradeloom ------------------------------------------------------------------


def test_the_demo_can_be_named_from_any_folder(folder: Path) -> None:
    config = load_config("graded-demo")
    assert config == load_config("graded-demo.yaml")
    assert config.source.path is not None
    assert len(Path(config.source.path).read_text().splitlines()) == 24
    assert config.label.policy == "intended"
    assert [f.max_words for f in config.filters if isinstance(f, LengthFilter)] == [60]
    assert config.judge is not None
    assert config.judge.pairwise is False
    assert config.generation.attempts == 2


def test_the_production_config_is_whole(folder: Path) -> None:
    (folder / "queries.train.tsv").write_text("1\twhy is the sky blue\n")
    config = load_config("graded-msmarco")
    assert config.judge is not None
    assert isinstance(config.engine, OpenAIEngine)
    assert isinstance(config.judge.engine, OpenAIEngine)
    assert config.judge.engine.model != config.engine.model
    assert config.judge.pairwise
    assert config.run.target == 50_000
    assert config.run.budget_tokens is not None
    assert config.run.canary is not None


@pytest.mark.realdata
def test_the_recorded_config_replays_both_models(realdata: Path) -> None:
    recorded = realdata / "recorded"
    config = load_config(
        "graded-recorded",
        [f"source.path={recorded}/graded_lists.jsonl", f"engine.path={recorded}/graded_lists.jsonl",
         f"judge.engine.path={recorded}/judgements.jsonl"],
    )  # fmt: skip
    assert isinstance(config.engine, ReplayEngine)
    assert config.label.policy == "agreed"


def test_every_packaged_config_is_tested_here() -> None:
    """Those of retrievers in test_retriever_cli.py, the judge's in test_judge.py."""
    assert list(packaged_configs()) == [
        "graded-demo", "graded-msmarco", "graded-recorded", "judge-demo", "retriever-demo",
        "retriever-evaluate", "retriever-mine", "retriever-recorded",
    ]  # fmt: skip


def test_a_prompt_may_lie_beside_its_configuration(folder: Path) -> None:
    (folder / "configs" / "mine.yaml").write_text("name: mine\nversion: '1'\nuser: x\n")
    text = SMALL + "generation: {prompt: mine.yaml}\njudge: {prompt: judge, pairwise_prompt: mine.yaml}\n"
    config = load_config(write(folder, text))
    assert config.generation.prompt == str(folder / "configs" / "mine.yaml")
    assert config.judge is not None
    assert (config.judge.prompt, config.judge.pairwise_prompt) == ("judge", config.generation.prompt)
    assert refused(folder, SMALL + "generation: {prompt: none.yaml}\n").startswith(
        "~/configs/c.yaml, field 'generation.prompt': no such file or folder: 'none.yaml'"
    )
