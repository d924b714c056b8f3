"""The API engine against SGLang's own /v1/completions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stillhouse.engines.base import EngineMismatch, ScoreRequest
from stillhouse.sglang_server.servers import SGLangServer
from tests.engines.api.completions import Api
from tests.engines.api.test_api_scorer import scoring, text_ids
from tests.sglang.conftest import STUDENT, TEACHER, TOLERANCE, Reference
from tests.teachers.test_other_tokenizer import expect_what_the_embedded_one_sends
from tests.teachers.tiny_tokenizers import far_model


@pytest.mark.parametrize("send", ["ids", "text"])
def test_scores_are_those_of_transformers(
    teacher: SGLangServer, teacher_reference: Reference, send: str, tmp_path: Path
) -> None:
    at = Api("sglang", url=f"{teacher.url}/v1")
    requests = [ScoreRequest(text_ids(f"{n}" * n), 5 + n) for n in range(8)]
    if send == "ids":  # no text's tokens
        requests.append(ScoreRequest(np.array([7, 250, 3, 3, 141], np.int32), 2))
    with scoring(at, tmp_path, send=send, reference=str(TEACHER)) as scorer:
        results = scorer.score(requests)
        assert scorer.way.form == "echo" and scorer.way.names_ids and scorer.way.text == (send == "text")
        assert scorer.max_context > 100 and not any("unscored" in name for name in scorer.figures)
    for asked, result in zip(requests, results, strict=True):
        expected = teacher_reference.of_tokens(asked.token_ids.tolist(), asked.start)
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_a_student_with_another_tokenizer_gets_what_the_embedded_teacher_sends(
    teacher: SGLangServer, tmp_path: Path
) -> None:
    with scoring(Api("sglang", url=f"{teacher.url}/v1"), tmp_path, folder=TEACHER) as scorer:
        expect_what_the_embedded_one_sends(scorer, far_model(tmp_path), TEACHER, top_k=0)


def test_other_weights_behind_it_are_noticed(teacher: SGLangServer, tmp_path: Path) -> None:
    at = Api("sglang", url=f"{teacher.url}/v1")
    with pytest.raises(EngineMismatch, match="other weights"), scoring(at, tmp_path, reference=str(STUDENT)):
        pass
