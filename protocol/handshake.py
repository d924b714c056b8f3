"""The checks of a Hello: may this peer connect? No I/O: the server asks, and answers the peer."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from stillhouse.protocol.messages import PROTOCOL_VERSION, Hello, Refused, Role

REMEMBERED_INCARNATIONS: Final = 16
"""Incarnations remembered per peer: the newest, and former ones, which must not come back."""
REMEMBERED_PEERS: Final = 4096
"""Peers whose incarnations are remembered. Made-up names cannot fill the memory: the peer admitted longest ago is
forgotten first."""
_LONGEST: Final = 100
"""Characters of a name."""
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST}}}")


class PeerId(NamedTuple):
    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def vocab_fingerprint(vocab: Mapping[str, int]) -> str:
    """SHA-256 (hex) of a token-to-id map, independent of its order: peers with equal fingerprints mean the same text by
    the same ids. Sizes are not compared: two vocabularies of one size may order their tokens differently, and models
    pad their embedding rows past the vocabulary.

    `vocab` is Hugging Face's `tokenizer.get_vocab()`, special and added tokens included. Raises ValueError if empty."""
    if not vocab:
        raise ValueError("got an empty vocabulary, expected a token-to-id map; is the tokenizer loaded?")
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in vocab.items()):
        # Byte-level tokenizers may hold lone surrogates; a length before each token keeps the encoding unambiguous.
        token_bytes = token.encode("utf-8", errors="surrogatepass")
        digest.update(b"%d:%d:" % (token_id, len(token_bytes)))
        digest.update(token_bytes)
    return digest.hexdigest()


def vocab_tokens(vocab: Mapping[str, int]) -> int:
    """One more than the largest id. An embedding may have more rows than that."""
    return max(vocab.values()) + 1


class Doorkeeper:
    """Checks Hellos against the run, its vocabulary, and the incarnations that were admitted before.

    `vocab_fingerprint` None: the learner's becomes the run's; until the learner comes, fingerprints are not compared.
    """

    def __init__(self, *, run_id: str, vocab_fingerprint: str | None) -> None:
        self.run_id: Final = run_id
        self.vocab_fingerprint = vocab_fingerprint or ""
        """The run's; empty while it is not known."""
        self._admitted: dict[PeerId, deque[str]] = {}
        """Incarnations of each peer, the newest last, whether it is still connected or not."""

    def incarnations(self) -> list[tuple[PeerId, list[str]]]:
        """Incarnations by peer; all but the last must not come back. The peer admitted last is last."""
        return [(peer, list(incarnations)) for peer, incarnations in self._admitted.items()]

    def restore(self, vocab_fingerprint: str, incarnations: list[tuple[PeerId, list[str]]]) -> None:
        """Take over what another process of the buffer knew."""
        self.vocab_fingerprint = self.vocab_fingerprint or vocab_fingerprint
        self._admitted = {peer: deque(names, maxlen=REMEMBERED_INCARNATIONS) for peer, names in incarnations}

    def admitted(self, hello: Hello) -> None:
        """Record that this peer was let in. Its former incarnation is replaced for good, even if it had fallen silent
        before: a Hello of the dead process may still be on its way, and must not replace the live one."""
        if hello.role == "learner":
            self.vocab_fingerprint = self.vocab_fingerprint or hello.vocab_fingerprint
        peer = PeerId(hello.role, hello.name)
        incarnations = self._admitted.pop(peer, None) or deque[str](maxlen=REMEMBERED_INCARNATIONS)
        if hello.incarnation not in incarnations:
            incarnations.append(hello.incarnation)
        self._admitted[peer] = incarnations  # re-inserted, so that the dict is in order of admission
        if len(self._admitted) > REMEMBERED_PEERS:
            del self._admitted[next(iter(self._admitted))]

    def misreads(self, hello: Hello) -> bool:
        """Whether this peer has another vocabulary than the run."""
        return bool(hello.vocab_fingerprint) and self.vocab_fingerprint not in ("", hello.vocab_fingerprint)

    def objection(self, hello: Hello) -> Refused | None:
        """The reason not to let this peer in; None if it may come in."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return wrong_version(hello.protocol_version)
        asks = hello.role == "launcher" and not hello.run_id
        if hello.run_id != self.run_id and not asks:
            return Refused("run_id", "this buffer belongs to another run", hello.run_id, self.run_id)
        fits = 1 <= len(hello.incarnation) <= _LONGEST and len(hello.pool) <= _LONGEST and hello.received_total >= 0
        if not fits or not _NAME.fullmatch(hello.name):
            got = f"name {hello.name[:100]!r}, incarnation {hello.incarnation[:100]!r}, {hello.received_total} received"
            expected = f"a name like {_NAME.pattern}, an incarnation and a pool of at most {_LONGEST}, a count"
            return Refused("malformed", "not a peer's identity", got, expected)
        if not hello.vocab_fingerprint and hello.role != "launcher":
            return Refused("vocab_fingerprint", f"a {hello.role} works on token ids", "", "a vocabulary fingerprint")
        if self.misreads(hello):
            message = "another token-to-id map than the run's: the same ids would mean other text"
            return Refused("vocab_fingerprint", message, hello.vocab_fingerprint, self.vocab_fingerprint)
        peer = PeerId(hello.role, hello.name)
        known = self._admitted.get(peer)
        if known is not None and hello.incarnation in known and hello.incarnation != known[-1]:
            message = f"another process has become {peer}; give each process its own name"
            return Refused("duplicate_name", message, hello.incarnation, "a new incarnation")
        strange = known is None or hello.incarnation not in known
        if strange and hello.received_total and len(self._admitted) < REMEMBERED_PEERS:
            return ahead_of_journal(hello, 0)
        return None


def wrong_version(version: int) -> Refused:
    return Refused("protocol_version", "another version of Stillhouse", str(version), str(PROTOCOL_VERSION))


def ahead_of_journal(hello: Hello, known_total: int) -> Refused:
    """The refusal of a peer that has received messages which this buffer does not know it sent (`known_total` 0: it has
    never met the peer). With such a peer, work would be done twice, and ids (rollouts, leases, batches) issued twice.
    The session stays as it is, because the claim may be false: it ends by silence, or with the next incarnation."""
    message = (
        "the buffer came back from a journal that could not be written when it died (disk full or unwritable; or the "
        "power failed, with buffer.journal_sync=process), or without one; resume the run from its last checkpoint"
    )
    return Refused("peer_ahead", message, f"{hello.received_total} messages received", f"at most {known_total}")
