"""The training loop: AdamW with a cosine, on one process or several, until steps or minutes are over.

Each process computes its rows of a step; FSDP averages their gradients. All random draws depend on seed
and step alone, so a training that was killed goes on as it would have.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from draftloop.errors import ConfigError
from draftloop.observability.progress import progress_bar
from draftloop.train import checkpoint
from draftloop.train.files import remove_leftovers, write_file
from draftloop.train.method import Batch, Losses
from draftloop.train.options import TrainOptions
from draftloop.train.packing import PackedRows, Packer, batch_fields
from draftloop.train.states import States
from draftloop.train.world import World

logger = logging.getLogger(__name__)

LOG_EVERY = 10
"""Steps between looks at the loss: each makes the host wait for the device."""
BETAS = (0.9, 0.95)


class Totals:
    """Losses of several batches, added up on the device."""

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self.sums = torch.zeros(2 + 2 * num_drafts, dtype=torch.float64, device=device)

    def add(self, losses: Losses) -> None:
        loss, weight, accepted_K, counted_K = losses
        self.sums += torch.cat((torch.stack((loss.detach(), weight)).double(), accepted_K, counted_K))

    def read(self, world: World) -> dict[str, Any]:
        """Mean loss, acceptance of each draft, and mean tokens of a step, bonus token included."""
        sums = world.sum(self.sums.clone()).tolist()
        num_drafts = (len(sums) - 2) // 2
        accepted, counted = sums[2 : 2 + num_drafts], sums[2 + num_drafts :]
        rates = [hits / max(count, 1) for hits, count in zip(accepted, counted, strict=True)]
        return {
            "loss": sums[0] / max(sums[1], 1e-9),
            "acceptance": [round(rate, 4) for rate in rates],
            "acceptance_length": round(1 + sum(rates), 4),
        }


class Trainer:
    """Trains one module. `standing.log` gets a row every few steps, and one with `held_out` per measurement."""

    def __init__(
        self,
        options: TrainOptions,
        module: torch.nn.Module,
        states: States,
        *,
        aux_layers: tuple[int, ...],
        num_drafts: int,
        packer: Packer,
        held_out: Sequence[PackedRows],
        folder: Path,
        identity: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        world: World,
    ) -> None:
        self.options, self.module, self.states, self.world = options, module, states, world
        self.aux_layers, self.num_drafts = aux_layers, num_drafts
        self.packer, self.held_out, self.folder, self.identity = packer, held_out, folder, identity
        self.device, self.dtype = device, dtype
        self.steps = options.steps or (
            None if options.minutes else max(round(options.epochs * packer.steps_per_epoch), 1)
        )
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=options.learning_rate,
            betas=BETAS,
            weight_decay=options.weight_decay,
            fused=device.type == "cuda",
        )
        self.standing = checkpoint.Standing()
        self._since: float | None = None

    # ---- the clock --------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Spent so far, without the first step of each start, which compiles."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.standing.seconds + running

    def progress(self) -> float:
        """From 0 to 1 over the training."""
        if self.steps is not None:
            return min(self.standing.step / self.steps, 1.0)
        assert self.options.minutes is not None
        return min(self.world.agree(self.seconds, self.device) / (60 * self.options.minutes), 1.0)

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then half a cosine down to `final_rate`."""
        options = self.options
        if progress < options.warmup:
            # the first step learns too; by the clock it begins at zero seconds
            share = max(progress / options.warmup, 1e-2)
            return options.learning_rate * share
        cosine = 0.5 * (1 + math.cos(math.pi * (progress - options.warmup) / (1 - options.warmup)))
        return options.learning_rate * (options.final_rate + (1 - options.final_rate) * cosine)

    # ---- training ---------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, from the last checkpoint if there is one.

        Raises ConfigError where a checkpoint is of another training or the loss is no number any more, and
        CapacityError where the disk is full.
        """
        checkpoints = self.folder / "checkpoints"
        if self.world.first:
            checkpoints.mkdir(parents=True, exist_ok=True)
            remove_leftovers(checkpoints)
        if self.options.resume and (path := checkpoint.newest(checkpoints)) is not None:
            self.standing = checkpoint.load(path, self.module, self.optimizer, identity=self.identity)
            if self.world.first:
                logger.info("going on from %s", path)
        elif self.world.first:
            for leftover in checkpoints.glob("step-*.pt"):
                leftover.unlink()
        options, standing = self.options, self.standing
        if not standing.log:
            self._measure(0.0)
        totals, tokens, began = self._totals(), 0, time.perf_counter()
        with progress_bar(total=100, description="Training", unit="%", show=None if self.world.first else False) as bar:
            for rows in self._rows(standing.step):
                progress = self.progress()
                bar.update(int(100 * progress) - bar.n)
                if progress >= 1:
                    break
                self._step(rows, progress, totals)
                standing.step += 1
                tokens += rows.token_ids_BL.numel()
                if self._since is None:
                    self._wait()
                    self._since = began = time.perf_counter()
                    tokens = 0
                if standing.step % LOG_EVERY == 0:
                    row = self._log(totals, tokens, time.perf_counter() - began, progress)
                    bar.set_postfix_str(
                        f"step {standing.step}, loss {row['loss']:.3f}, length {row['acceptance_length']:.2f}, "
                        f"{row['tokens_per_s'] / 1e3:.0f}k tok/s"
                    )
                    totals, tokens, began = self._totals(), 0, time.perf_counter()
                measures, saves = (standing.step % n == 0 for n in (options.evaluate_every, options.checkpoint_every))
                if measures:
                    self._measure(progress)
                if saves:
                    self.save()
                if measures or saves:
                    tokens, began = 0, time.perf_counter()
        last = standing.log[-1]
        if last["step"] == standing.step and "held_out" in last:
            if last["progress"] == 1.0:
                return  # an earlier run finished
            last["progress"] = 1.0
        else:
            self._measure(1.0)
        self.save()

    def save(self) -> None:
        """Write a checkpoint, and the log beside it."""
        standing = checkpoint.Standing(step=self.standing.step, seconds=self.seconds, log=self.standing.log)
        checkpoint.save(
            self.folder / "checkpoints",
            standing,
            self.module,
            self.optimizer,
            identity=self.identity,
            writes=self.world.first,
        )
        if self.world.first:
            lines = "".join(json.dumps(row) + "\n" for row in standing.log)
            write_file(
                self.folder / "log.jsonl",
                lambda path: path.write_text(lines, encoding="utf-8"),
                kept="the last checkpoint is complete",
            )

    def _rows(self, first: int) -> Iterator[PackedRows]:
        return self.packer.steps(first, pin=self.device.type == "cuda")

    def _totals(self) -> Totals:
        return Totals(self.num_drafts, self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _parts(self, rows: PackedRows, parts: int) -> Iterator[Batch]:
        """This process's rows on the device with the target's states, in so many parts."""
        per_part = len(rows.documents) // (self.world.size * parts)
        for part in range(parts):
            start = (self.world.rank * parts + part) * per_part
            mine = rows.part(slice(start, start + per_part)).to(self.device)
            aux_BLX, hidden_BLC = self.states(mine, self.aux_layers)
            yield Batch(**batch_fields(mine), aux_BLX=aux_BLX, hidden_BLC=hidden_BLC)

    def _forward(self, batch: Batch, progress: float) -> Losses:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.module(batch, progress)

    def _step(self, rows: PackedRows, progress: float, totals: Totals) -> None:
        self.module.train()
        world, options = self.world, self.options
        torch.manual_seed((options.seed + 1) * 1_000_003 + self.standing.step * world.size + world.rank)
        # gradients are averaged over processes, and added up over parts
        scale = world.size / max(rows.num_learnt, 1)
        for batch in self._parts(rows, options.accumulate):
            losses = self._forward(batch, progress)
            (losses.loss * scale).backward()
            totals.add(losses)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), options.clip)
        rate = self.learning_rate(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # ---- measuring --------------------------------------------------------------------------

    def _log(self, totals: Totals, tokens: int, seconds: float, progress: float) -> dict[str, Any]:
        found = totals.read(self.world)
        if not math.isfinite(found["loss"]):
            raise ConfigError(
                f"the loss is {found['loss']} at step {self.standing.step}; lower --learning-rate "
                f"({self.options.learning_rate}) or --clip ({self.options.clip}) and start over with --no-resume"
            )
        return self._note(
            progress=round(progress, 6),
            learning_rate=self.learning_rate(progress),
            tokens_per_s=round(tokens / max(seconds, 1e-9), 1),
            **found,
        )

    def _measure(self, progress: float) -> None:
        """Acceptance on documents that are not trained on."""
        self.module.eval()
        totals = self._totals()
        torch.manual_seed(self.options.seed)
        with torch.no_grad():
            for rows in self.held_out:
                for batch in self._parts(rows, 1):
                    totals.add(self._forward(batch, 1.0))
        row = self._note(progress=round(progress, 6), held_out=totals.read(self.world))
        if self.world.first:
            logger.info(
                "step %d: held-out acceptance length %.3f (%s)",
                row["step"],
                row["held_out"]["acceptance_length"],
                ", ".join(f"{rate:.3f}" for rate in row["held_out"]["acceptance"]),
            )

    def _note(self, **values: Any) -> dict[str, Any]:
        row = {"step": self.standing.step, "minutes": round(self.seconds / 60, 3), **values}
        self.standing.log.append(row)
        return row


def share(module: torch.nn.Module, world: World, device: torch.device) -> torch.nn.Module:
    """Split the weights over the processes (FSDP2), where there are several."""
    if world.size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh(device.type, (world.size,)))
    return module
