"""`draftloop train`: record, train, export; each goes on where it was left."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from draftloop.errors import ConfigError
from draftloop.models.fingerprint import fingerprint
from draftloop.models.loader import eos_token_ids, load_config, resolve_model
from draftloop.train import checkpoint
from draftloop.train.export import export
from draftloop.train.files import make_folder
from draftloop.train.loop import Trainer, share
from draftloop.train.method import Method, Subject, method_class
from draftloop.train.options import TrainOptions
from draftloop.train.packing import Packer, held_out_steps, split
from draftloop.train.plot import plot
from draftloop.train.record import record
from draftloop.train.recording import Documents, Recording
from draftloop.train.states import States, StoredStates, TargetStates
from draftloop.train.world import ALONE, World

logger = logging.getLogger(__name__)

DRAFTER = "drafter"
"""Below --out: the exported folder."""


def run_train(options: TrainOptions, method_options: Any) -> Path:
    """Make a drafter and return its folder (with `record_only`, that of the recording).

    Raises ConfigError for what cannot work, and CapacityError where the disk is full.
    """
    world = _join_world(options)
    try:
        return _run(options, method_options, world)
    finally:
        if world.size > 1:
            dist.destroy_process_group()


def _run(options: TrainOptions, method_options: Any, world: World) -> Path:
    if options.data is not None and not Path(options.data).is_file():  # before the target is loaded
        raise ConfigError(f"--data is {options.data!r}, which is no file; check the path")
    out = make_folder(Path(options.out), "--out")
    device, dtype = _device(options), _dtype(options)
    source = resolve_model(options.target)
    config, revision = load_config(source), fingerprint(source.folder) if source.folder else ""
    compiled = device.type == "cuda" if options.compile is None else options.compile

    recording: Recording | None = None
    if options.hidden_states is None:
        recording = _recorded(options, revision, config.vocab_size, world)
        if options.record_only:
            return recording.folder

    target = TargetStates(options.target, device=device, dtype=dtype, row_tokens=options.row_tokens, compiled=compiled)
    states, documents, data = _documents(options, recording, target)
    subject = Subject(
        name=options.target,
        folder=source.folder,
        config=config,
        embed_tokens=target.model.embed_tokens.detach(),
        lm_head=target.model.lm_head.detach(),
        final_norm=target.model.final_norm.detach(),
        eos_ids=tuple(eos_token_ids(source)),
        row_tokens=options.row_tokens,
        compile=compiled,
        world=world,
    )
    method = method_class(options.method)(method_options, subject)
    chosen, held_out = split(documents, options.held_out_tokens, options.seed)
    batch_tokens = _batch_tokens(options, device)
    rows_per_step = _rows_per_step(options, batch_tokens, world)
    packer = Packer(documents, chosen, row_tokens=options.row_tokens, rows_per_step=rows_per_step, seed=options.seed)
    module = share(_module(options, method, documents, chosen).to(device), world, device)
    trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    if world.first:
        logger.info(
            "%s: %.2f M parameters to train, %d documents (%.1f M tokens), %d steps an epoch of %d tokens",
            method.name,
            trained / 1e6,
            len(chosen),
            documents.lengths[chosen].sum() / 1e6,
            packer.steps_per_epoch,
            batch_tokens,
        )
    trainer = Trainer(
        options,
        module,
        states,
        aux_layers=method.aux_layers,
        num_drafts=method.num_drafts,
        packer=packer,
        held_out=held_out_steps(documents, held_out, row_tokens=options.row_tokens, rows=rows_per_step),
        folder=out,
        identity={
            "method": method.name,
            "target": revision,
            "seed": options.seed,
            "batch_tokens": batch_tokens,
            "options": {name: repr(value) for name, value in dataclasses.asdict(method_options).items()},
        },
        device=device,
        dtype=dtype,
        world=world,
    )
    trainer.run()
    weights = checkpoint.weights_of(module)
    folder = out / DRAFTER
    if world.first:
        log = trainer.standing.log
        facts = {**data, "documents": len(chosen), "tokens": int(documents.lengths[chosen].sum())}
        export(folder, method, weights, revision=revision, data=facts, log=log, store_bits=options.store_bits)
        plot(out / "training.png", log, title=f"{method.name} for {Path(options.target).name}")
        logger.info("the drafter is in %s", folder)
    return folder


def _documents(
    options: TrainOptions, recording: Recording | None, target: TargetStates
) -> tuple[States, Documents, dict[str, Any]]:
    """Where states come from, the documents, and what a card says of them. None: states that are on disk."""
    config = target.config
    states: States = target
    documents: Documents
    if recording is not None:
        documents, data = recording.documents(), dict(recording.settings)
    else:
        assert options.hidden_states is not None
        states = StoredStates(options.hidden_states, config=config, device=target.device, dtype=target.dtype)
        documents, data = states.documents(options.row_tokens, config.vocab_size), {"data": "stored hidden states"}
    if cut := int((documents.lengths > options.row_tokens).sum()):
        logger.warning("%d documents of more than --row-tokens %d tokens lose their end", cut, options.row_tokens)
    return states, documents, data


def _rows_per_step(options: TrainOptions, batch_tokens: int, world: World) -> int:
    """Raises ConfigError where processes and parts cannot share them evenly."""
    count = batch_tokens // options.row_tokens
    if count % (world.size * options.accumulate):
        raise ConfigError(
            f"a step has {count} rows, which {world.size} processes in {options.accumulate} parts cannot share "
            "evenly; change --batch-tokens"
        )
    return count


def _module(options: TrainOptions, method: Method, documents: Documents, chosen: np.ndarray) -> torch.nn.Module:
    """The drafter as it is before the first step."""
    mask = np.zeros(len(documents), dtype=bool)
    mask[chosen] = True
    counts_V = torch.from_numpy(documents.token_counts(method.subject.config.vocab_size, mask))
    torch.manual_seed(options.seed)
    module = method.build(counts_V)
    if options.init_from is not None:
        method.initialise(module, Path(options.init_from))
    return module


def _recorded(options: TrainOptions, revision: str, vocab_size: int, world: World) -> Recording:
    """A recording with the tokens asked for; what is missing is recorded first."""
    folder = make_folder(options.recording_folder, "--recording")
    settings = {
        "data": options.data or "prompts that the target invented",
        "greedy answers": options.greedy_share,
        "answers up to": f"{options.answer_tokens} tokens",
    }
    recording = Recording.open(
        folder, target=options.target, revision=revision, vocab_size=vocab_size, settings=settings
    )
    if world.size == 1:
        record(options, recording)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine's cache and graphs make room for training
    elif not recording.shards():
        raise ConfigError(
            f"{str(folder)!r} holds no recording, and several processes would record at once; run with --record-only "
            "in one process first"
        )
    return recording


def _uses_gpu(options: TrainOptions) -> bool:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda', but there is no usable GPU; leave it out")
    return options.device != "cpu" and torch.cuda.is_available()


def _join_world(options: TrainOptions) -> World:
    """By what torchrun says in the environment."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    if _uses_gpu(options):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if _uses_gpu(options) else "gloo")
    return World(rank=dist.get_rank(), size=size)


def _device(options: TrainOptions) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if _uses_gpu(options) else torch.device("cpu")


def _dtype(options: TrainOptions) -> torch.dtype:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.bfloat16 if _uses_gpu(options) else torch.float32


def _batch_tokens(options: TrainOptions, device: torch.device) -> int:
    if options.batch_tokens is not None:
        return options.batch_tokens
    rows = options.row_tokens * options.accumulate
    return max((32_768 if device.type == "cuda" else 4_096) // rows, 1) * rows
