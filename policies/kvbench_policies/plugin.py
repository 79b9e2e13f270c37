"""Announces the policies of this package: strings only, nothing here imports torch."""

from __future__ import annotations

from kvbench.entries import Parameter, PolicyEntry
from kvbench.hookspecs import hookimpl

_SINKS = Parameter("sinks", "int", "4", "first tokens of the sequence, never evicted")
_WINDOW = Parameter("window", "int", "16", "newest tokens, never evicted; a token is scored when it leaves")
_DECAY = (
    Parameter("decay", "str", "none", "how a score loses weight with age"),
    Parameter("horizon", "int", "2048", "length for which the bounds of a learned decay are set"),
)

_GATE = (
    _SINKS,
    _WINDOW,
    Parameter("hidden", "int", "64", "width of the gate"),
    Parameter("temperature", "float", "0.1", "of the logistic relaxation in training"),
    Parameter("detached", "bool", "False", "the gate's gradient does not reach the language model"),
    Parameter("shifts", "list", "()", "(kept share, shift) pairs that training measured"),
)


@hookimpl
def kvbench_policies() -> list[PolicyEntry]:
    """Return the policies of this package."""
    return [
        PolicyEntry(
            name="full",
            target="kvbench_policies.full:Full",
            summary="no eviction: as many slots as tokens, the dense model through the same engine",
        ),
        PolicyEntry(
            name="random",
            target="kvbench_policies.random:Random",
            summary="seeded random priorities: the floor of every comparison",
        ),
        PolicyEntry(
            name="streaming_llm",
            target="kvbench_policies.streaming_llm:StreamingLlm",
            summary="the first tokens and the newest ones",
            paper="Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453",
            parameters=(_SINKS,),
        ),
        PolicyEntry(
            name="tova",
            target="kvbench_policies.tova:Tova",
            summary="evicts what the newest query attends to least, averaged over the heads of a layer",
            paper="Oren et al. 2024, Transformers are Multi-State RNNs, arXiv:2401.06104",
            needs=("attention",),
            prefill="chunked",
        ),
        PolicyEntry(
            name="tova_head",
            target="kvbench_policies.tova_head:TovaHead",
            summary="TOVA decided in each KV head by itself",
            paper="Oren et al. 2024, Transformers are Multi-State RNNs, arXiv:2401.06104",
            needs=("attention",),
            prefill="chunked",
        ),
        PolicyEntry(
            name="knorm",
            target="kvbench_policies.knorm:Knorm",
            summary="evicts the longest keys",
            paper="Devoto et al. 2024, A Simple and Effective L2 Norm-Based Strategy, arXiv:2406.11430",
            parameters=(Parameter("window", "int", "1", "newest tokens, never evicted"),),
        ),
        PolicyEntry(
            name="h2o",
            target="kvbench_policies.h2o:H2o",
            summary="evicts what has drawn least attention so far; half of the budget is for the newest tokens",
            paper="Zhang et al. 2023, H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv:2306.14048",
            needs=("attention",),
            prefill="chunked",
            parameters=(Parameter("recent", "float", "0.5", "share of the budget for the newest tokens"),),
        ),
        PolicyEntry(
            name="kvpop",
            target="kvbench_policies.kvpop.policy:Kvpop",
            summary="learned priority, decided when a token leaves the window by an mLSTM that has read what followed",
            paper="KVpop, arXiv:2607.05061: the delayed mLSTM scorer",
            learned=True,
            trainable=True,
            parameters=(
                _SINKS,
                _WINDOW,
                Parameter("features", "int", "16", "size of the features that write and read the state, even"),
                Parameter("values", "int", "8", "size of what is written"),
                Parameter("hidden", "int", "32", "width of the readout"),
                Parameter("feature_map", "str", "hedgehog", "hedgehog, or softmax"),
                Parameter("value_projection", "bool", "True", "write a projection, not the cached value itself"),
                Parameter("gate_cap", "float", "15.0", "soft bound of both gates, 0 for none"),
                Parameter("head_norm", "bool", "True", "normalise what is read"),
                Parameter("skip", "bool", "True", "the readout also sees the scored token itself"),
                Parameter("scoring", "str", "delayed", "delayed, or immediate: read at the token's own step"),
                *_DECAY,
            ),
        ),
        PolicyEntry(
            name="kvpop_mlp",
            target="kvbench_policies.kvpop_mlp.policy:KvpopMlp",
            summary="learned priority from a token's own key and value (KVpop's stateless scorer)",
            paper="KVpop, arXiv:2607.05061: the stateless scorer",
            learned=True,
            trainable=True,
            parameters=(_SINKS, _WINDOW, Parameter("hidden", "int", "64", "width of the scorer"), *_DECAY),
        ),
        PolicyEntry(
            name="kvpop_linear",
            target="kvbench_policies.kvpop_linear.policy:KvpopLinear",
            summary="learned priority, linear in a token's own key and value (KVpop's smallest scorer)",
            paper="KVpop, arXiv:2607.05061: the linear scorer",
            learned=True,
            trainable=True,
            parameters=(_SINKS, _WINDOW, *_DECAY),
        ),
        PolicyEntry(
            name="dms",
            target="kvbench_policies.dms.policy:Dms",
            summary="a learned gate drops each token by itself; memory is matched on average, not bounded",
            paper="Lancucki et al. 2025, Inference-Time Hyper-Scaling with KV Cache Compression, arXiv:2506.05345",
            learned=True,
            trainable=True,
            hard_budget=False,
            parameters=_GATE,
        ),
        PolicyEntry(
            name="dms_topk",
            target="kvbench_policies.dms_topk.policy:DmsTopk",
            summary="the gates of dms as a static priority under the hard budget",
            paper="Lancucki et al. 2025, arXiv:2506.05345, for the gates; the ranking is ours",
            learned=True,
            runs_on="dms",
            parameters=_GATE,
        ),
        PolicyEntry(
            name="streaming_llm_plus",
            target="kvbench_policies.streaming_llm_plus:StreamingLlmPlus",
            summary="StreamingLLM on an LM trained under its mask: what adapting the LM does without a scorer",
            paper="KVpop, arXiv:2607.05061: its control",
            learned=True,
            trainable=True,
            parameters=(_SINKS, Parameter("window", "int", "1", "newest tokens counted apart from the cache")),
        ),
    ]
