"""A tiny random retriever, for tests of whatever needs a sentence-transformers model."""

from __future__ import annotations

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;?!'-"
WORDS = ("the", "of", "and", "to", "in", "is", "what", "how", "query", "passage", "thing", "level", "about")


def make_tiny_encoder(folder: Path, *, normalize: bool = True, seed: int = 0) -> Path:
    """Save a random BERT (2 layers, 32 dimensions, mean pooling) as a sentence-transformers folder.

    A few whole words and every letter, digit and common mark are tokens, so that different texts get
    different embeddings. The same seed gives the same weights.

    Args:
        folder: where to; made if need be.
        normalize: end in a Normalize module (cosine); otherwise dot product.
        seed: of the weights.

    Returns:
        The folder.
    """
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *CHARACTERS, *(f"##{c}" for c in CHARACTERS), *WORDS]
    vocabulary = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
    ).save_pretrained(parts)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Wider than BERT's .02: with it, mean pooling of a random model makes all texts nearly the same.
        model = BertModel(
            BertConfig(
                vocab_size=len(vocabulary),
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=128,
                initializer_range=0.3,
            )
        )
    model.save_pretrained(parts)
    transformer = Transformer(str(parts), max_seq_length=128)
    modules = [transformer, Pooling(32, "mean"), *([Normalize()] if normalize else [])]
    SentenceTransformer(
        modules=modules, similarity_fn_name="cosine" if normalize else "dot", device="cpu"
    ).save(str(folder), create_model_card=False)
    for file in parts.iterdir():
        file.unlink()
    parts.rmdir()
    return folder
