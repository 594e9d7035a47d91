"""From a trained target to its two drafters: on-policy text, the MTP layer, DSpark, calibration and measured
acceptance."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from soloist.train.acceptance import mean_length
from soloist.train.data import load_documents
from soloist.train.dspark import Drafter, calibrate, dspark_proposals, save_drafter, train_dspark
from soloist.train.export import load_model, save_model
from soloist.train.model import Ling
from soloist.train.mtp import mtp_proposals, train_mtp
from soloist.train.nano import DOMAINS, place_of
from soloist.train.prompts import cut_prompts
from soloist.train.sample import Sequences, frozen, generate, join
from soloist.train.tokenizer import END_OF_TEXT, MASK, ROLE_END, token_id

# how often each domain's prompts are drawn, and the temperatures that the target writes at
SHARES = {"docs": 4, "code": 3, "chat": 4, "maths": 1, "json": 1}
TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.8)
# prompts generated at once; the state of one takes 1.6 MB
GENERATED_AT_ONCE = 4096


def marks(folder: Path) -> dict[str, int]:
    """Ids of the special tokens that training needs."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {name: token_id(tokenizer, name) for name in (END_OF_TEXT, ROLE_END, MASK, "</think>")}


def prompts_of(work: Path, split: str, domain: str, count: int, seed: int, answer_mark: int) -> list[list[int]]:
    """Prompts of one domain: page starts for plain text, conversations up to the answer for the others."""
    documents = load_documents([work / f"{split}-{domain}.npz"])
    return cut_prompts(documents, count, seed, answer_after=None if domain in ("docs", "code") else answer_mark)


def write_texts(
    target: Ling,
    prompts: list[list[int]],
    width: int,
    ids: dict[str, int],
    seed: int,
    temperatures: tuple[float, ...] = (0.0,),
) -> Sequences:
    """What the target writes after each prompt, `width` tokens in all."""
    parts = []
    for start in range(0, len(prompts), GENERATED_AT_ONCE):
        some = prompts[start : start + GENERATED_AT_ONCE]
        heat = [temperatures[(start + i) % len(temperatures)] for i in range(len(some))]
        parts.append(generate(target, some, width, (ids[END_OF_TEXT], ids[ROLE_END]), heat, seed + start))
    return join(parts)


def measure(target: Ling, drafter: Drafter | None, texts: Sequences, width: int) -> tuple[float, list[float]]:
    """Tokens per round and acceptance of each slot on texts that the target wrote greedily (MTP where drafter is
    None)."""
    proposals = dspark_proposals(target, drafter, texts)[0] if drafter else mtp_proposals(target, texts, width)
    return mean_length(texts.ids.cpu(), proposals.cpu(), texts.prompt.cpu(), texts.end.cpu())


def train_drafters(
    model: str | Path,
    work: str | Path,
    *,
    parts: tuple[str, ...] = ("mtp", "dspark"),
    texts: int = 16384,
    width: int = 384,
    mtp_minutes: float = 2.0,
    dspark_minutes: float = 5.0,
    batch: int = 32,
    anchors: int = 128,
    held_out: int = 64,
    mtp_steps: int | None = None,
    dspark_steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Improve the MTP layer of a trained folder and add a DSpark drafter to it, in `model/dspark`.

    Args: parts which of the two are trained; texts how many the target writes, `width` tokens each; the steps replace
        the minutes where given;
        held_out prompts per domain to measure on, and as many others to calibrate on.
    Returns: acceptance per domain, also written to `model/acceptance.json`.
    """
    model, work, place = Path(model), Path(work), place_of(device)
    target, ids = frozen(load_model(model), place), marks(model)
    prompts = []
    for domain in DOMAINS:
        share = texts * SHARES[domain] // sum(SHARES.values())
        prompts += prompts_of(work, "train", domain, share, seed, ids["</think>"])
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    say(f"the target writes {len(prompts)} texts of {width} tokens")
    written = write_texts(target, [prompts[i] for i in order], width, ids, seed, TEMPERATURES)
    tests, others = _held_out(target, work, held_out, width, ids)
    result: dict[str, object] = {"texts": len(written), "tokens": int((written.end - written.prompt).sum())}
    say(f"the target wrote {result['tokens']} tokens")
    result["mtp_before"] = _by_domain(target, None, tests, say)
    config = json.loads((model / "config.json").read_text())
    if "mtp" in parts:
        trained = train_mtp(
            target,
            written,
            work / "mtp",
            steps=mtp_steps or 0,
            batch=2 * batch,
            seed=seed,
            say=say,
            seconds=None if mtp_steps else 60 * mtp_minutes,
        )
        target.mtp.load_state_dict(trained.state_dict())
        target = frozen(target, place)
        result["mtp"] = _by_domain(target, None, tests, say)
        save_model(target, model, max_length=config["max_position_embeddings"], eos=ids[ROLE_END], pad=ids[END_OF_TEXT])
    if "dspark" in parts:
        layers = target.shape.num_hidden_layers
        drafter = train_dspark(
            target,
            written,
            work / "dspark",
            mask_token_id=ids[MASK],
            batch=batch,
            anchors=anchors,
            seed=seed,
            say=say,
            target_layer_ids=tuple(sorted({1, layers // 2, layers - 2})),
            steps=dspark_steps or 0,
            seconds=None if dspark_steps else 60 * dspark_minutes,
        )
        save_drafter(drafter, model / "dspark", config, calibrate(others, *dspark_proposals(target, drafter, others)))
        result["dspark"] = _by_domain(target, drafter, tests, say)
    (model / "acceptance.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _held_out(target: Ling, work: Path, count: int, width: int, ids: dict[str, int]) -> tuple[dict[str, Sequences], Sequences]:
    """Greedy texts after held-out prompts: those to measure on by domain, and others to calibrate on."""
    tests, others = {}, []
    for domain in DOMAINS:
        prompts = prompts_of(work, "heldout", domain, 2 * count, 1, ids["</think>"])
        tests[domain] = write_texts(target, prompts[::2], width, ids, 0)
        others.append(write_texts(target, prompts[1::2], width, ids, 0))
    return tests, join(others)


def _by_domain(
    target: Ling, drafter: Drafter | None, tests: dict[str, Sequences], say: Callable[[str], None]
) -> dict[str, object]:
    found: dict[str, object] = {}
    lengths = []
    for domain, texts in tests.items():
        length, slots = measure(target, drafter, texts, 3)
        found[domain] = {
            "tokens_per_round": round(length, 3),
            "slots": [round(x, 3) for x in slots],
            "prompts": len(texts),
        }
        lengths.append(length)
    found["average"] = round(sum(lengths) / len(lengths), 3)
    shown = "  ".join(f"{d} {x:.2f}" for d, x in zip(tests, lengths, strict=True))
    say(f"{'dspark' if drafter else 'mtp'} tokens per round: {shown}  average {found['average']}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `soloist train mtp` and `soloist train dspark` on a folder that `train nano` wrote."""
    parser.add_argument("--model", default="runs/nano", help="folder of the trained target (default: runs/nano)")
    parser.add_argument("--work", default="runs/work", help="folder of corpus and checkpoints (default: runs/work)")
    parser.add_argument("--texts", type=int, default=16384, help="texts that the target writes to train on")
    parser.add_argument("--mtp-minutes", type=float, default=2.0)
    parser.add_argument("--dspark-minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: auto)")


def run(args: argparse.Namespace) -> dict[str, object]:
    """`soloist train mtp` and `train dspark`: returns the acceptance per domain. `args.parts` says which of them."""
    return train_drafters(
        args.model,
        args.work,
        parts=args.parts,
        texts=args.texts,
        mtp_minutes=args.mtp_minutes,
        dspark_minutes=args.dspark_minutes,
        seed=args.seed,
        device=args.device,
    )
