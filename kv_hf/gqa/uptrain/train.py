"""The loop of an uptraining: steps, the plan of the learning rate, evaluations and states in between."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from ...errors import ConversionError
from .evaluate import Evaluation, evaluate
from .interrupt import StopRequest
from .losses import distillation_loss
from .progress import Progress, save_state, states
from .settings import UptrainSettings
from .windows import WindowOrder

UNPLANNED = 1_000_000  # steps, until the first one has told how long one takes


@dataclass
class Run:
    """All parts of a run, prepared.

    Attributes:
        accelerator: of accelerate.
        student, optimizer: prepared by it; the student is in evaluation mode, see models.load_student.
        teacher: on its device.
        windows: dataset of windows [length] to train on, of which the first `count` are used.
        held: token ids to evaluate on.
        settings: what was asked for.
        progress: where the run stands.
        work: folder of states.
        notify: called behind every step, on the main process.
    """

    accelerator: Accelerator
    student: Any
    teacher: Any
    optimizer: Any
    windows: Any
    count: int
    held: list[list[int]]
    settings: UptrainSettings
    progress: Progress
    work: Path
    notify: Callable[[Progress], object]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all processes."""
        own = self.settings.batch * self.settings.accumulate * len(self.windows[0]["input_ids"])
        return own * self.accelerator.num_processes

    def evaluate(self) -> Evaluation:
        """Return the held-out figures now, and keep them in the curve."""
        found = evaluate(
            self.accelerator, self.student, self.teacher, self.held, self.settings.batch
        )
        progress = self.progress
        since = progress.evaluations[-1]["step"] if progress.evaluations else 0
        losses = [loss for loss, _, _ in progress.losses[since:]]
        row = {
            "step": progress.step,
            "tokens": progress.step * self.tokens_per_step,
            "seconds": round(progress.seconds, 1),
            "cpu_seconds": round(progress.cpu_seconds, 1),
            "loss": sum(losses) / len(losses) if losses else None,
            **found.row(),
        }
        if progress.evaluations and progress.evaluations[-1]["step"] == progress.step:
            progress.evaluations.pop()
        progress.evaluations.append(row)
        return found

    def train(self, request: StopRequest) -> bool:
        """Train to the end, or until a request to stop; say whether the end was reached. The state behind the last step is saved."""
        settings, progress = self.settings, self.progress
        progress.set_rate(settings.lr)
        batches = iter(self._loader())
        while True:
            stop, planned, due = self._agree(request)
            progress.planned = planned
            if due:
                self.evaluate()
            if stop or progress.step >= planned:
                break
            began, began_cpu = time.monotonic(), time.process_time()
            self._set_rate()
            progress.losses.append(self._step(batches))
            progress.seconds += time.monotonic() - began
            progress.cpu_seconds += time.process_time() - began_cpu
            progress.step += 1
            if progress.step % settings.save_every == 0:
                self._save()
            if self.accelerator.is_main_process:
                self.notify(progress)
        if progress.step:
            self._save()
        return not stop

    def _save(self) -> None:
        for name, tensor in self.accelerator.unwrap_model(self.student).named_parameters():
            if not tensor.isfinite().all():
                raise self._diverged(f"{name} is not finite behind")
        save_state(self.accelerator, self.work, self.progress.step)

    def _diverged(self, what: str) -> ConversionError:
        """Return an error about a step, that says what can be done: no state was saved since."""
        found = states(self.work)
        step, saved = self.progress.step, int(found[-1].name[6:]) if found else 0
        if step > saved:
            remedy = f"go on from step {saved} (resume) with an lr below {self.settings.lr:g}"
        elif saved:
            remedy = f"its state does not help: delete {str(self.work)!r} and begin anew with an lr below {self.settings.lr:g}"
        else:
            remedy = "nothing was trained before it, so that it is the student's, the teacher's or that of the dtype"
        return ConversionError(f"{what} step {step}; {remedy}")

    def _loader(self) -> DataLoader[Any]:
        order = WindowOrder(
            self.count, self.settings.batch, self.settings.seed, start=self.progress.step * self.settings.accumulate,
            rank=self.accelerator.process_index, processes=self.accelerator.num_processes,
        )  # fmt: skip
        # a loader draws a number even for an order of its own: not from the generator of the process
        own = torch.Generator().manual_seed(self.settings.seed)
        return DataLoader(self.windows, batch_sampler=order, generator=own)

    def _agree(self, request: StopRequest) -> tuple[bool, int, bool]:
        """Return (stop, steps planned in all, evaluate now), the same on all processes."""
        settings, progress = self.settings, self.progress
        limit = settings.steps if settings.steps is not None else UNPLANNED
        part = progress.step / limit if settings.steps is not None else 0.0
        if settings.minutes is not None:
            left = settings.minutes * 60 - progress.seconds
            part = max(part, progress.seconds / (settings.minutes * 60))
            if left <= 0:
                limit = min(limit, progress.step)
            elif progress.step:
                pace = progress.seconds / progress.step
                limit = min(limit, progress.step + math.ceil(left / pace))
        made = len(progress.evaluations)
        due = made <= settings.evaluations and made / (settings.evaluations + 1) <= part < 1
        due = due and progress.evaluations[-1]["step"] < progress.step
        if self.accelerator.num_processes == 1:
            return request.asked, limit, due
        main = self.accelerator.is_main_process
        shared = torch.tensor([int(request.asked), limit * main, int(due) * main])
        shared = self.accelerator.reduce(shared.to(self.accelerator.device), "sum").cpu()
        return bool(shared[0]), int(shared[1]), bool(shared[2])

    def _set_rate(self) -> None:
        """Set the learning rate of the step at hand: warm-up, then a cosine to the end as planned now."""
        progress = self.progress
        for group in self.optimizer.param_groups:
            group["initial_lr"] = self.settings.lr
            group["lr"] = self.settings.lr
        warmup = min(self.settings.warmup, progress.planned // 5)
        get_cosine_schedule_with_warmup(
            self.optimizer, warmup, progress.planned, last_epoch=progress.step - 1
        )

    def _step(self, batches: Any) -> tuple[float, float, float]:
        """Update the weights once; return (loss, KL, cross entropy), means over all processes."""
        settings, accelerator = self.settings, self.accelerator
        sums = torch.zeros(3, device=accelerator.device)
        for _ in range(settings.accumulate):
            ids = next(batches)["input_ids"].to(accelerator.device)
            with torch.no_grad():
                wanted = self.teacher(input_ids=ids, use_cache=False).logits
            with accelerator.accumulate(self.student):
                logits = self.student(input_ids=ids, use_cache=False).logits
                parts = distillation_loss(
                    logits, wanted, ids, alpha=settings.alpha, temperature=settings.temperature
                )
                accelerator.backward(parts[0])
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.student.parameters(), settings.clip)
                    self._check_gradient(float(norm))  # the same on all processes
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += torch.stack([part.detach() for part in parts])
        loss, kl, entropy = accelerator.reduce(sums / settings.accumulate, "mean").tolist()
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss} in")
        return loss, kl, entropy

    def _check_gradient(self, norm: float) -> None:
        """Raise ConversionError for a gradient that is not finite, before it becomes weights.

        A scaler (float16) leaves out such steps and scales less, which finds gradients that are finite unless they never are.
        """
        scaler = self.accelerator.scaler
        if not math.isfinite(norm) and (scaler is None or scaler.get_scale() < 1):
            raise self._diverged(f"the gradient's norm is {norm} in")
