"""The names of the package's top with their types: they are loaded when they are asked for."""

from annotated_transformer.data.corpora import (
    text_of_lines as text_of_lines,
)
from annotated_transformer.engine.checkpoints import (
    load_system as load_system,
)
from annotated_transformer.engine.checkpoints import (
    save_system as save_system,
)
from annotated_transformer.engine.config import (
    load_recipe as load_recipe,
)
from annotated_transformer.engine.scoring import (
    score_pairs as score_pairs,
)
from annotated_transformer.engine.system import (
    System as System,
)
from annotated_transformer.engine.system import (
    join_systems as join_systems,
)
from annotated_transformer.engine.system import (
    n_best_lines as n_best_lines,
)
from annotated_transformer.engine.system import (
    translate_lines as translate_lines,
)
from annotated_transformer.engine.trainer import (
    Trainer as Trainer,
)
from annotated_transformer.fast.sampling import (
    Sampling as Sampling,
)
from annotated_transformer.model.architecture import (
    Decoder as Decoder,
)
from annotated_transformer.model.architecture import (
    DecoderLayer as DecoderLayer,
)
from annotated_transformer.model.architecture import (
    Encoder as Encoder,
)
from annotated_transformer.model.architecture import (
    EncoderDecoder as EncoderDecoder,
)
from annotated_transformer.model.architecture import (
    EncoderLayer as EncoderLayer,
)
from annotated_transformer.model.architecture import (
    Generator as Generator,
)
from annotated_transformer.model.architecture import (
    LayerNorm as LayerNorm,
)
from annotated_transformer.model.architecture import (
    SublayerConnection as SublayerConnection,
)
from annotated_transformer.model.architecture import (
    clones as clones,
)
from annotated_transformer.model.attention import (
    attention as attention,
)
from annotated_transformer.model.embeddings import (
    Embeddings as Embeddings,
)
from annotated_transformer.model.embeddings import (
    LearnedPositions as LearnedPositions,
)
from annotated_transformer.model.embeddings import (
    PositionalEncoding as PositionalEncoding,
)
from annotated_transformer.model.embeddings import (
    sinusoid as sinusoid,
)
from annotated_transformer.model.feed_forward import (
    PositionwiseFeedForward as PositionwiseFeedForward,
)
from annotated_transformer.model.multi_head import (
    MultiHeadedAttention as MultiHeadedAttention,
)
from annotated_transformer.model.multi_head import (
    padding_mask as padding_mask,
)
from annotated_transformer.model.multi_head import (
    subsequent_mask as subsequent_mask,
)
from annotated_transformer.model.transformer import (
    PRESETS as PRESETS,
)
from annotated_transformer.model.transformer import (
    ModelConfig as ModelConfig,
)
from annotated_transformer.model.transformer import (
    build_model as build_model,
)
from annotated_transformer.model.transformer import (
    count_parameters as count_parameters,
)
from annotated_transformer.model.transformer import (
    make_model as make_model,
)
from annotated_transformer.notation import (
    BOS as BOS,
)
from annotated_transformer.notation import (
    EOS as EOS,
)
from annotated_transformer.notation import (
    PAD as PAD,
)
from annotated_transformer.notation import (
    UNK as UNK,
)
from annotated_transformer.pretrained import (
    load_pretrained as load_pretrained,
)
from annotated_transformer.training.batches import (
    Batch as Batch,
)
from annotated_transformer.training.batches import (
    make_batch as make_batch,
)
from annotated_transformer.training.batches import (
    token_batches as token_batches,
)
from annotated_transformer.training.copy_task import (
    data_gen as data_gen,
)
from annotated_transformer.training.loop import (
    NonFiniteError as NonFiniteError,
)
from annotated_transformer.training.loop import (
    Progress as Progress,
)
from annotated_transformer.training.loop import (
    batch_loss as batch_loss,
)
from annotated_transformer.training.loop import (
    evaluate as evaluate,
)
from annotated_transformer.training.loop import (
    fit as fit,
)
from annotated_transformer.training.loop import (
    update as update,
)
from annotated_transformer.training.optimizer import (
    NoamOpt as NoamOpt,
)
from annotated_transformer.training.optimizer import (
    make_adam as make_adam,
)
from annotated_transformer.training.optimizer import (
    noam_schedule as noam_schedule,
)
from annotated_transformer.training.optimizer import (
    rate as rate,
)
from annotated_transformer.training.regularization import (
    LabelSmoothing as LabelSmoothing,
)
from annotated_transformer.training.regularization import (
    smoothed_target as smoothed_target,
)
from annotated_transformer.translation.beam_search import (
    Hypothesis as Hypothesis,
)
from annotated_transformer.translation.beam_search import (
    beam_search as beam_search,
)
from annotated_transformer.translation.greedy import (
    greedy_decode as greedy_decode,
)
from annotated_transformer.translation.greedy import (
    greedy_search as greedy_search,
)
from annotated_transformer.translation.tokenizers import (
    BPETokenizer as BPETokenizer,
)

__version__: str
__all__: list[str]
