"""Cards and prompts: what is asked for is locked, named and checked before anything runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from soloist.bench.card import card_of, load_card, presets, sampling_params
from soloist.bench.flags import prompt_flags
from soloist.bench.prepare import with_prompts
from soloist.bench.prompts import SETS, build_prompts, prompts_sha256
from soloist.bench.records import Workload
from soloist.bench.target import Prompt
from soloist.errors import UserError
from soloist.testing.tokenizer import write_tokenizer
from soloist.text.tokenizer import load_tokenizer
from soloist.weights.tokenizer_files import folder_source
from tests.bench_runs import CARD, Ids


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_card(name: str) -> None:
    card = load_card(name)
    assert card.name == name and card.variants[0].acceptance == "off"


def test_presets_ask_what_they_are_known_for() -> None:
    reference = load_card("reference")
    assert {w.prompts for w in reference.workloads} == {"tiled", "random"}
    assert {(w.input_tokens, w.output_tokens, w.num_prompts) for w in reference.workloads} == {(8192, 1024, 1000)}
    assert {w.prompts for w in load_card("real").workloads} == {f"set:{name}" for name in SETS}
    assert {v.drafter for v in load_card("demo").variants} == {"none", "ngram", "mtp", "dspark"}
    depths = [w.input_tokens or 0 for w in load_card("depth").workloads]
    assert min(depths) == 1024 and max(depths) > 255_000
    assert len({w.temperature for w in load_card("sampling").workloads}) == 5
    assert load_card("stability").seconds == 1800
    assert any(v.synthetic for v in load_card("pinned").variants)


def test_set_reaches_every_part_of_a_card() -> None:
    card = load_card("demo", ["repeats=5", "output_tokens=9", "threads=1", "variant.NEXTN.draft_width=2",
                              "workload.six manners.num_prompts=3", "temperature=[0.0, 0.5]", "model=folder/x"])  # fmt: skip
    assert (card.repeats, card.settings["threads"], card.model) == (5, 1, "folder/x")
    assert [w.name for w in card.workloads] == ["six manners T=0", "six manners T=0.5"]
    assert [(w.output_tokens, w.num_prompts, w.temperature) for w in card.workloads] == [(9, 3, 0.0), (9, 3, 0.5)]
    assert next(v.draft_width for v in card.variants if v.name == "NEXTN") == 2


def test_variants_are_added_with_fields_and_settings() -> None:
    card = load_card("reference", ["num_prompts=3"], ["NEXTN:drafter=mtp,draft_width=3", "5:accept_length=5,draft_width=7",
                                                      "wide:prefill_chunk=2048"])  # fmt: skip
    plain, nextn, pinned, wide = card.variants
    assert (plain.acceptance, nextn.drafter, nextn.draft_width, nextn.acceptance) == ("off", "mtp", 3, "real")
    assert (pinned.drafter, pinned.acceptance, pinned.accept_length, pinned.synthetic) == ("scripted", "pinned", 5.0, True)
    assert (wide.acceptance, wide.settings) == ("off", {"prefill_chunk": 2048})


@pytest.mark.parametrize("added, said", [
    ("NEXTN", "must be NAME:KEY=VALUE"), ("NEXTN:", "must be NAME:KEY=VALUE"), (":drafter=mtp", "must be NAME:KEY=VALUE"),
    ("x:drafer=mtp", "did you mean drafter"), ("plain:drafter=ngram", "two variants are called 'plain'"),
    ("x:accept_length=9,draft_width=7", "from 1 to draft_width"), ("x:drafter=magic", "not one of none"),
])  # fmt: skip
def test_a_variant_that_cannot_be_is_a_sentence(added: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_card("reference", [], [added])


@pytest.mark.parametrize("change, said", [
    ("repeets=3", "did you mean repeats"), ("output_token=3", "did you mean output_tokens"), ("repeats", "must be KEY=VALUE"),
    ("drafter=ngram", "belongs to one variant"), ("variant.nobody.drafter=mtp", "no variant 'nobody'"),
    ("variant.plain.drafer=mtp", "did you mean drafter"), ("repeats=many", "must be a whole number"), ("repeats=0", "at least 1"),
    ("seconds=-1.0", "above 0"), ("seconds=nan", "above 0"), ("seconds=inf", "and end"),
    ("output_tokens=0", "at least 1"), ("cache=tepid", "cold, warm"),
    ("variant.plain.drafter=magic", "not one of none"), ("variant.plain.drafter=mtp", "acceptance=off goes with"),
    ("variant.NEXTN.accept_length=2.0", "go together"), ("temperature=-1.0", "temperature"), ("weights=x", "unknown key"),
])  # fmt: skip
def test_a_wrong_set_is_a_sentence(change: str, said: str) -> None:
    changes = ["variant.plain.acceptance=off", change]
    with pytest.raises(UserError, match=said):
        load_card("demo", changes)


def test_what_is_no_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="presets are"):
        load_card("demon")
    with pytest.raises(UserError, match="cannot be read"):
        load_card(str(tmp_path / "no.toml"))
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(UserError, match="is not TOML"):
        load_card(str(tmp_path / "bad.toml"))
    with pytest.raises(UserError, match="has no workload"):
        card_of({"name": "x", "model": "nano"}, "x")
    pinned = {"name": "p", "drafter": "scripted", "draft_width": 3, "acceptance": "pinned", "accept_length": 5.0}
    work = {"name": "w", "prompts": "random", "num_prompts": 1, "output_tokens": 1}
    with pytest.raises(UserError, match="from 1 to draft_width"):
        card_of({"name": "x", "model": "nano", "workloads": [work], "variants": [pinned]}, "x")
    with pytest.raises(UserError, match="two variants are called"):
        card_of({"name": "x", "model": "nano", "workloads": [work], "variants": [{"name": "a"}] * 2}, "x")


def test_the_hash_labels_the_card_and_nothing_else() -> None:
    assert CARD.hash() == dataclasses.replace(CARD).hash()
    changed = [dataclasses.replace(CARD, seed=1), dataclasses.replace(CARD, weights="sha256:1")]
    changed += [dataclasses.replace(CARD, variants=CARD.variants[:1])]
    assert len({CARD.hash(), *(card.hash() for card in changed)}) == 4


def test_sampled_requests_have_a_seed_and_greedy_ones_need_none() -> None:
    workload = CARD.workloads[0]
    assert sampling_params(workload, 7) == {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    assert sampling_params(dataclasses.replace(workload, sampling={"temperature": 1.0}), 7)["seed"] == 7


class TextEncoder:
    """A real tokenizer with a chat template."""

    has_text = has_chat = True

    def __init__(self, folder: Path):
        write_tokenizer(folder)
        tokenizer = load_tokenizer(folder_source(folder))
        assert tokenizer is not None
        self.tokenizer, self.vocab_size, self.special_ids = tokenizer, tokenizer.vocab_size, tokenizer.special_ids

    def encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode(self.tokenizer.render_chat(prompt), add_special=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["tiled", "random"])
def test_sized_prompts_have_their_length_and_nothing_in_common(family: str) -> None:
    workload = Workload("w", family, 20, 8, input_tokens=700)
    prompts = build_prompts(workload, 0, Ids(), extra=2)
    assert len(prompts) == 22 and {len(p.token_ids or ()) for p in prompts} == {700}
    assert len({(p.token_ids or ())[:8] for p in prompts}) == 22
    assert all(0 not in (p.token_ids or ()) and 1 not in (p.token_ids or ()) for p in prompts)
    assert prompts == build_prompts(workload, 0, Ids(), extra=2) != build_prompts(workload, 1, Ids(), extra=2)
    (flag,) = prompt_flags("w", prompts) or [None]
    assert flag is not None and flag.kind == ("repetitive prompts" if family == "tiled" else "random prompts")


def test_sets_give_every_prompt_its_ids_and_domain(tmp_path: Path) -> None:
    encoder = TextEncoder(tmp_path)
    for name in (*SETS, "nano"):
        prompts = build_prompts(Workload("w", f"set:{name}", 6, 8), 0, encoder, extra=1)
        assert len(prompts) == 7 and all(p.token_ids and p.domain for p in prompts)
        assert len({p.token_ids for p in prompts}) == 7
    joined = build_prompts(Workload("w", "joined", 3, 8, input_tokens=900), 0, encoder)
    assert {len(p.token_ids or ()) for p in joined} == {900} and len({p.token_ids for p in joined}) == 3


def test_own_prompts_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n{"token_ids": [4, 5]}\n{"text": "go on"}\n')
    prompts = build_prompts(Workload("w", f"file:{file}", 3, 8), 0, None)
    assert prompts[0].messages == ({"role": "user", "content": "one"},) and prompts[1].token_ids == (4, 5)
    assert prompts[2].text == "go on" and {p.domain for p in prompts} == {"mine"}
    file.write_text('{"question": "?"}\n')
    with pytest.raises(UserError, match="mine.jsonl:1 is not a prompt"):
        build_prompts(Workload("w", f"file:{file}", 1, 8), 0, None)


@pytest.mark.parametrize("prompts, changes, said", [
    ("set:verses", {}, "no prompt set"), ("set:code", {"num_prompts": 99}, "holds 8"), ("poems", {}, "must be set:NAME"),
    ("set:code", {"input_tokens": 5}, "have their own lengths"), ("random", {}, "need input_tokens"),
    ("joined", {"input_tokens": 5}, "no tokenizer"), ("set:code", {}, "no tokenizer"), ("file:/nowhere", {}, "cannot be read"),
])  # fmt: skip
def test_prompts_that_cannot_be_had_are_refused(prompts: str, changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_prompts(dataclasses.replace(Workload("w", prompts, 2, 8), **changes), 0, Ids())  # type: ignore[arg-type]


def test_a_card_that_names_its_prompts_hash_runs_on_no_others() -> None:
    card, _ = with_prompts(CARD, Ids())
    assert card.workloads[0].prompts_sha256 and with_prompts(card, Ids())[0] == card
    with pytest.raises(UserError, match="the card wants"):
        with_prompts(dataclasses.replace(card, seed=5), Ids())
    assert prompts_sha256([Prompt("a", "", (1, 2))]) != prompts_sha256([Prompt("a", "", (1,)), Prompt("a", "", (2,))])
