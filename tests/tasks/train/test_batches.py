"""Which lists stand in one batch, and how their texts become tensors."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_encoder import make_tiny_encoder

from gradeloom.schemas.retriever import EncoderConfig
from gradeloom.tasks.encoder import load_encoder
from gradeloom.tasks.train.batches import DistinctQueries, ListCollator, distinct_groups, text_limits


def batches(
    queries: list[str], size: int, *, seed: int = 0, epoch: int = 0, devices: int = 1, drop_last: bool = False
) -> list[list[int]]:
    sampler = DistinctQueries(
        Dataset.from_dict({"query": queries}), size, drop_last=drop_last, seed=seed, devices=devices
    )
    sampler.set_epoch(epoch)
    found = list(sampler)
    assert len(sampler) == len(found)
    return found


# --- groups ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 9), st.randoms())
def test_groups_hold_everything_once_and_are_full_but_the_last(
    keys: list[int], size: int, random: object
) -> None:
    order = list(range(len(keys)))
    random.shuffle(order)  # type: ignore[attr-defined]
    groups = list(distinct_groups(order, keys, size))
    assert sorted(index for group in groups for index in group) == sorted(order)
    assert [len(group) for group in groups[:-1]] == [size] * (len(groups) - 1)
    assert len(groups) == -(-len(keys) // size)


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 9))
def test_a_key_stands_twice_only_where_too_few_others_are_left(keys: list[int], size: int) -> None:
    left = Counter(keys)
    for group in distinct_groups(range(len(keys)), keys, size):
        of_group = Counter(keys[index] for index in group)
        if max(of_group.values()) > 1:
            assert len(of_group) == len(left)  # every key there was has its place already
            assert len(left) < size
        left = +(left - of_group)
    assert not left


def test_groups_by_hand() -> None:
    keys = [0, 0, 1, 0, 2, 3]
    assert list(distinct_groups(range(6), keys, 2)) == [[0, 2], [1, 4], [3, 5]]
    assert list(distinct_groups(range(4), [0, 0, 0, 1], 2)) == [[0, 3], [1, 2]]
    assert list(distinct_groups([], [], 3)) == []


# --- batches --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), st.integers(1, 5), st.integers(0, 9))
def test_the_order_is_a_function_of_seed_and_epoch(queries: list[str], size: int, seed: int) -> None:
    for epoch in (0, 3):
        assert batches(queries, size, seed=seed, epoch=epoch) == batches(
            queries, size, seed=seed, epoch=epoch
        )


def test_another_epoch_and_another_seed_have_another_order() -> None:
    queries = [f"q{n}" for n in range(50)]
    orders = [
        tuple(index for batch in batches(queries, 4, seed=seed, epoch=epoch) for index in batch)
        for seed, epoch in ((0, 0), (0, 1), (7, 0), (7, 1))
    ]
    assert len(set(orders)) == 4
    assert [sorted(order) for order in orders] == [list(range(50))] * 4


def test_an_order_drawn_again_is_the_same_whatever_was_drawn_between() -> None:
    sampler = DistinctQueries(Dataset.from_dict({"query": [f"q{n}" for n in range(20)]}), 4, False, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), st.integers(1, 4))
def test_batches_of_one_step_are_the_batch_of_one_device_cut(queries: list[str], size: int) -> None:
    two, one = batches(queries, size, devices=2), batches(queries, 2 * size)
    assert [two[k] + (two[k + 1] if k + 1 < len(two) else []) for k in range(0, len(two), 2)] == one


def test_a_last_batch_that_is_not_full_is_left_out_on_demand() -> None:
    queries = [f"q{n}" for n in range(10)]
    assert [len(batch) for batch in batches(queries, 4)] == [4, 4, 2]
    assert [len(batch) for batch in batches(queries, 4, drop_last=True)] == [4, 4]
    assert [len(batch) for batch in batches(queries, 3, devices=2, drop_last=True)] == [3, 3, 3]


def test_no_query_twice_in_a_step_of_two_devices() -> None:
    queries = [f"q{n // 3}" for n in range(30)]
    found = batches(queries, 2, devices=2, seed=5)
    for first, second in list(pairwise(found))[::2][:6]:
        assert len({queries[index] for index in first + second}) == 4


# --- texts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("batches") / "encoder")


def test_texts_get_their_prompts_and_limits(folder: Path) -> None:
    config = EncoderConfig(
        model=str(folder), query_prompt="query ", passage_prompt="passage ", query_tokens=6,
        passage_tokens=9, device="cpu",
    )  # fmt: skip
    encoder = load_encoder(config)
    before = encoder.model.max_seq_length
    row = {"query": "what is a b c d e f g h", "passage_0": "the thing of a b c d e f g h", "passage_1": ""}
    with text_limits(encoder):
        batch = ListCollator(encoder, 2)([row | {"label": [3.0, float("nan")]}] * 2)
    told = {
        column: encoder.model.tokenizer.decode(batch[f"{column}_input_ids"][0], skip_special_tokens=True)
        for column in row
    }
    assert told["query"].split()[:3] == ["query", "what", "is"]
    assert told["passage_0"].split()[:3] == ["passage", "the", "thing"]
    assert told["passage_1"].split() == ["passage"]
    assert batch["query_input_ids"].shape == (2, 6)
    assert batch["passage_0_input_ids"].shape == (2, 9)
    assert batch["label"].shape == (2, 2)
    assert batch["label"][:, 0].tolist() == [3.0, 3.0]
    assert batch["label"][:, 1].isnan().all()
    assert not [key for key in batch if key.endswith("_task")]
    assert encoder.model.max_seq_length == before
    assert encoder.model.prompts["query"] == "query "
    assert encoder.model.prompts["document"] == "passage "
