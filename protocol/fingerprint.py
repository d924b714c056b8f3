"""One number for a token-to-id map: peers whose fingerprints are equal mean the same text by the same ids.

Sizes are not compared: vocabularies of one size may order their tokens differently, and models pad their embedding
rows past the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def vocab_fingerprint(vocab: Mapping[str, int]) -> str:
    """SHA-256 (hex) of the token-to-id map, whatever its iteration order.

    `vocab` is token -> id, as Hugging Face's `tokenizer.get_vocab()` gives it, special and added tokens included.
    Raises ValueError for an empty map.
    """
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
    """Ids are below this. The rows of an embedding may be more."""
    return max(vocab.values()) + 1
