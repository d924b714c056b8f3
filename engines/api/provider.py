"""Provider of teachers that somebody else serves. No torch."""

from __future__ import annotations

from typing import Final, cast

from stillhouse.engines.api.config import ApiConfig
from stillhouse.engines.provider import AutoFacts, EngineProvider, EngineRole, ScorerSource, WithTeacher
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.payloads.kind import PayloadOptions
from stillhouse.protocol.payloads.registry import kind_of


class ApiProvider(EngineProvider):
    name = "api"
    title = "an API"
    roles = ("teacher",)

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        return ("stillhouse.engines.api.probe", "stillhouse.models.tokenizer_file")

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        """`models.teacher` has the API's tokenizer, or the probe refuses it. It is the student where none is given."""
        from stillhouse.engines.api.budget import FOLDER, Budget
        from stillhouse.engines.api.link import Link
        from stillhouse.engines.api.probe import find_model, probe
        from stillhouse.engines.api.scorer import ApiScorer
        from stillhouse.engines.base import EngineMismatch
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.teacher.section(self.name, ApiConfig), ctx.config.models.teacher
        tokenizer = FileTokenizer(path)
        n_ids = vocab_tokens(tokenizer.get_vocab())

        def start() -> ApiScorer:
            try:
                budget = Budget(ctx.run_dir / FOLDER / f"{ctx.name}.json", config)
            except ValueError as error:
                raise EngineMismatch(str(error)) from None
            link = Link(config.url, config.key_env)
            try:
                model, window = find_model(link, config)
                scorer = ApiScorer(link, config, budget, tokenizer, model=model, vocab_size=vocabulary_size(path))
                scorer.max_context = scorer.max_context if window is None else window - 1
                encoder = kind_of(cast(PayloadOptions, ctx.config.teacher)).encoder(scorer, n_ids)
                probe(scorer, config, encoder.options.top_k if encoder is not None else 0)
            except BaseException:
                link.close()
                raise
            return scorer

        return ScorerSource(tokenizer.fingerprint, n_ids, start)

    def fits(self, query: AutoFacts) -> tuple[bool, str]:
        return bool(query.api), f"{query.api} is given" if query.api else "no API is given"


PROVIDER: Final = ApiProvider()
