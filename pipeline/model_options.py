"""``--labeler model``: its options, and the way from summaries to candidates and runs through an endpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pipeline.candidates import check_candidates, load_candidates
from pipeline.chat_client import ChatClient, Usage
from pipeline.command_line import non_negative_int, positive_int
from pipeline.cross_check import labelable
from pipeline.discovery import LOWEST, DiscoverySettings, discover
from pipeline.endpoint import Endpoint
from pipeline.files import InputError, write_json
from pipeline.label_output import Target, run_json, write_runs
from pipeline.model_labeler import LabelSettings, ModelLabeler
from pipeline.records import Record, read_summaries


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``--labeler model``."""
    group = parser.add_argument_group("--labeler model")
    group.add_argument("--base-url", help="OpenAI-compatible endpoint (default: the first of VLLM_BASE_URLS)")
    group.add_argument("--model", help="model name (default: VLLM_MODEL)")
    group.add_argument("--api-key-env", default="VLLM_API_KEY", help="environment variable that holds the key")
    group.add_argument("--temperature", type=float, default=0.7, help="of discovery and labelling")
    group.add_argument("--seed", type=non_negative_int, default=0, help="of sampling and of all orders")
    group.add_argument("--max-tokens", type=positive_int, default=4096, help="tokens of an answer")
    group.add_argument("--chunk-chars", type=positive_int, default=24_000, help="characters of trajectory in a request")
    group.add_argument("--concurrency", type=positive_int, default=16, help="requests under way")
    group.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer")
    group.add_argument("--retries", type=int, default=5, help="further attempts of a request")
    group.add_argument("--discovery-batches", type=positive_int, default=4, help="discovery requests before the merge")
    group.add_argument("--benchmark", default="general", choices=["general", "tau-bench", "swebench"], help="advice")
    group.add_argument("--schema-mode", default="json_schema", choices=["json_schema", "json_object", "none"])
    group.add_argument("--show-outcome", action="store_true", help="tell the labeller the outcome (not blind)")
    group.add_argument("--price-in", type=float, default=0.0, help="price of a million prompt tokens")
    group.add_argument("--price-out", type=float, default=0.0, help="price of a million completion tokens")


def endpoint(args: argparse.Namespace) -> Endpoint:
    """The endpoint that options and environment name.

    Raises:
        InputError: no URL or no model.
    """
    urls = os.environ.get("VLLM_BASE_URLS") or os.environ.get("VLLM_BASE_URL") or ""
    url = args.base_url or urls.split(",")[0].strip()
    model = args.model or os.environ.get("VLLM_MODEL", "")
    if not url or not model:
        missing = "--base-url (or VLLM_BASE_URLS)" if not url else "--model (or VLLM_MODEL)"
        raise InputError(f"--labeler model needs {missing}")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--base-url: expected http://HOST:PORT, found {url!r}")
    if args.retries < 0 or args.timeout <= 0 or args.temperature < 0:
        raise InputError("--retries and --temperature must be >= 0, --timeout > 0")
    key = os.environ.get(args.api_key_env, "")
    return Endpoint(url, model, key, args.timeout, args.retries, args.schema_mode)


def load_records(path: str, part: str) -> list[Record]:
    """The trajectories to label: passed or failed, with messages, of the right part."""
    records = []
    for record in read_summaries(path):
        if record.outcome is None:
            raise InputError(f"summaries {path}: is a blind file; give the one with outcomes, they are not shown")
        if labelable(record) and record.split in (None, part):
            records.append(record)
    if not records:
        raise InputError(f"summaries {path}: holds no trajectory with an outcome and messages to label")
    return records


async def find_candidates(
    client: ChatClient, args: argparse.Namespace, target: Target, records: list[Record]
) -> dict[str, Any]:
    """Candidates from ``--candidates``, from an earlier start, or from discovery (then written)."""
    if args.candidates or target.candidates.exists():
        return load_candidates(args.candidates or target.candidates).model_dump(exclude_none=True)
    settings = DiscoverySettings(
        n_candidates=args.n_candidates,
        batches=args.discovery_batches,
        chunk_chars=args.chunk_chars,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        benchmark=args.benchmark,
    )
    data, shown = await discover(client, records, settings)
    check_candidates(data, "candidates of discovery")
    write_json(target.candidates, data)
    n = len(data["candidates"])
    sys.stdout.write(f"discovery: {n} candidates from {shown} of {len(records)} trajectories -> {target.candidates}\n")
    if n < min(LOWEST, args.n_candidates):
        sys.stdout.write(f"warning: discovery gave only {n} different candidates; try a stronger model\n")
    return data


async def label(args: argparse.Namespace, target: Target) -> str:
    """Discovery and labelling; the text says what was done and what it cost."""
    place = endpoint(args)
    records = load_records(args.input, args.part)
    target.refuse_foreign_runs(range(1, args.n_runs + 1))
    settings = LabelSettings(
        n_runs=args.n_runs,
        chunk_chars=args.chunk_chars,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        concurrency=args.concurrency,
        show_outcome=args.show_outcome,
    )
    async with ChatClient(place) as client:
        data = await find_candidates(client, args, target, records)
        discovery = Usage(**vars(client.usage))
        candidates = check_candidates(data, "candidates")
        log = Path(target.folder) / f"{target.prefix}label_log.jsonl"
        labeler = ModelLabeler(client, records, candidates, settings, log)
        await labeler.run()
    about = {
        "kind": "model",
        "model": place.model,
        "blind": not settings.show_outcome,
        "temperature": settings.temperature,
        "quotes": labeler.doubts.model_dump(),
    }
    names = [c.name for c in candidates.candidates]
    runs = {
        n: run_json(n, labeler.labelled(n), names, evidence=labeler.evidence(n), labeler=about)
        for n in range(1, args.n_runs + 1)
    }
    write_runs(target, data, runs)
    return _story(args, labeler, discovery, len(records), len(names))


def _story(args: argparse.Namespace, labeler: ModelLabeler, discovery: Usage, n_records: int, n_names: int) -> str:
    used, doubts = labeler.usage, labeler.doubts
    prompt = used.prompt_tokens + discovery.prompt_tokens
    completion = used.completion_tokens + discovery.completion_tokens
    cost = ""
    if args.price_in or args.price_out:
        cost = f", cost {(prompt * args.price_in + completion * args.price_out) / 1e6:.2f}"
    return (
        f"{args.n_runs} runs of {n_records} trajectories and {n_names} capabilities -> {args.output_dir}\n"
        f"{used.requests + discovery.requests} answers, {prompt} prompt and {completion} completion tokens{cost}; "
        f"quotes: {doubts.moved} moved to their message, {doubts.downgraded} LACKING without a true quote became "
        f"PRESENT, {doubts.unsupported} PRESENT without one"
    )
