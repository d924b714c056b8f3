"""The slots of a student and of a teacher that read the same sequences, so that what is sampled can be a mixture of
both (`Sampling.teacher_share`): MiniLLM's teacher-mixed sampling (Gu et al. 2024, arXiv 2306.08543, section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.engines.torch.decoders import Int64s, Slots
from stillhouse.engines.torch.slot_experts import SlotExperts
from stillhouse.engines.torch.step import Prefill


class MixedSlots:
    """`Slots` of the student; the teacher's go along."""

    def __init__(self, student: Slots, teacher: Slots) -> None:
        self._student, self._teacher = student, teacher
        self.title, self.shares_prompts = student.title, student.shares_prompts and teacher.shares_prompts
        self.refresh = student.refresh  # the teacher's weights stay
        self.teacher_logits_RV = torch.empty(0)
        """Logits of the last step over the student's vocabulary, float32 [R, V]."""

    @property
    def experts(self) -> SlotExperts | None:
        return self._student.experts

    @experts.setter
    def experts(self, experts: SlotExperts | None) -> None:
        self._student.experts = experts

    @property
    def memory_bytes(self) -> int:
        return self._student.memory_bytes + self._teacher.memory_bytes

    def run(self, ids_R: Int64s, positions_R: Int64s, prefills: Sequence[Prefill]) -> Tensor:
        logits_RV = self._student.run(ids_R, positions_R, prefills)
        teacher_RV = self._teacher.run(ids_R, positions_R, prefills).float()
        # Models of one tokenizer may have different numbers of rows for ids that no token has.
        lacking = logits_RV.shape[1] - teacher_RV.shape[1]
        self.teacher_logits_RV = torch.nn.functional.pad(teacher_RV, (0, lacking), value=float("-inf"))
        return logits_RV

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None:
        self._student.copy_slots(sources, targets, n_tokens)
        self._teacher.copy_slots(sources, targets, n_tokens)

    def clear_slot(self, slot: int) -> None:
        self._student.clear_slot(slot)
        self._teacher.clear_slot(slot)

    def drop(self) -> None:
        self._student.drop()
        self._teacher.drop()
