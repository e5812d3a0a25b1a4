"""`/v1/rerank` over a pipeline of `tokenize_pair` and a small seeded cross-encoder; the oracle is NumPy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lathe.server.access.quotas import Quota, Quotas
from tests.server.pipelines.example_server import Running
from tests.server.pipelines.test_examples import embed_by_hand
from tests.server.server_thread import until

WORDS = ["iris", "wine", "petal", "sepal", "alcohol", "italian", "flower", "length", "width", "the", "of", "a"]
QUERY = "the width of a petal"
DOCUMENTS = ["italian wine", "the length of a petal of a flower", "", "alcohol " * 40, "iris flower", "petal width"]
PIPELINE = """
inputs = ["query", "document"]
outputs = ["score", "tokens"]

[[step]]
name = "tokenize"
builtin = "tokenize_pair"
options = {max_length = 24, multiple = 8}
inputs = {text = "query", pair = "document"}
outputs = {input_ids = "ids", attention_mask = "mask", token_type_ids = "types", tokens = "tokens"}

[[step]]
name = "score"
model = "cross"
inputs = {input_ids = "ids", attention_mask = "mask", token_type_ids = "types"}
outputs = {logits = "logits"}

[[step]]
name = "activate"
builtin = "sigmoid"
inputs = {logits = "logits"}
outputs = {probabilities = "score"}
"""


def tokenizer() -> Tokenizer:
    """Words as tokens, and BERT's template of pairs."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
    made = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def weights() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(7)
    shapes = {"words": (16, 8), "kinds": (2, 8), "dense": (8, 8), "head": (8, 1)}
    return {name: numbers.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def cross_encoder() -> bytes:
    """ids, mask, types -> logits [n, 1]: the masked mean of tanh((words + kinds) dense), times `head`."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Gather", ["kinds", "token_type_ids"], ["kind"]),
        helper.make_node("Add", ["word", "kind"], ["token"]),
        helper.make_node("MatMul", ["token", "dense"], ["product"]),
        helper.make_node("Tanh", ["product"], ["hidden"]),
        helper.make_node("Cast", ["attention_mask"], ["weight"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weight", "last"], ["column"]),
        helper.make_node("Mul", ["hidden", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "places"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["column", "places"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "head"], ["logits"]),
    ]
    constants = {**weights(), "last": np.array([2]), "places": np.array([1])}
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 1])
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "cross", inputs, [output], initializers)
    return onnx.ModelProto.SerializeToString(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def expected_scores(query: str, documents: list[str], most: int = 24) -> list[float]:
    given, encoder = weights(), tokenizer()
    found: list[float] = []
    encoder.enable_truncation(most)
    for document in documents:
        pair = encoder.encode(query, document)
        hidden = np.tanh((given["words"][pair.ids] + given["kinds"][pair.type_ids]) @ given["dense"])
        found.append(1 / (1 + np.exp(-(hidden.mean(axis=0) @ given["head"])[0])))
    return found


@pytest.fixture(scope="module")
def url(running: Running, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rerank")
    (folder / "cross.onnx").write_bytes(cross_encoder())
    (folder / "pipeline.toml").write_text(PIPELINE)
    tokenizer().save(str(folder / "tokenizer.json"))
    running.client.upload("cross", folder / "cross.onnx")
    running.client.upload("reranker", folder / "pipeline.toml")
    return f"http://127.0.0.1:{running.port}/v1/rerank"


def rerank(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url, json={"model": "reranker", "query": QUERY, "documents": DOCUMENTS, **body}, timeout=60)


@pytest.mark.slow
def test_documents_are_ordered_by_their_scores(url: str) -> None:
    expected = expected_scores(QUERY, DOCUMENTS)
    answer = rerank(url).json()
    results = answer["results"]
    assert [each["index"] for each in results] == sorted(range(len(expected)), key=lambda index: -expected[index])
    np.testing.assert_allclose(
        [each["relevance_score"] for each in results], [expected[each["index"]] for each in results], atol=1e-6
    )
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[each["index"]] for each in results]
    encoder = tokenizer()
    encoder.enable_truncation(24)
    tokens = sum(len(encoder.encode(QUERY, document).ids) for document in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} and answer["model"] == "reranker"


def test_the_best_documents_without_their_texts(url: str) -> None:
    whole = rerank(url).json()["results"]
    documents = [{"text": text} for text in DOCUMENTS]
    best = rerank(url, documents=documents, top_n=2, return_documents=False).json()["results"]
    assert [each["index"] for each in best] == [each["index"] for each in whole[:2]]
    assert all(set(each) == {"index", "relevance_score"} for each in best)
    assert len(rerank(url, top_n=100).json()["results"]) == len(DOCUMENTS)


@pytest.mark.parametrize("most", [3, 4, 7, 24])
def test_pairs_are_truncated_to_as_many_tokens_as_asked(url: str, most: int) -> None:
    """The longer text of a pair first, as Transformers' `truncation=True` does. Three tokens are special."""
    answer = rerank(url, truncate_prompt_tokens=most).json()
    expected = expected_scores(QUERY, DOCUMENTS, most)
    np.testing.assert_allclose(
        [each["relevance_score"] for each in answer["results"]],
        [expected[each["index"]] for each in answer["results"]], atol=1e-6,
    )  # fmt: skip
    encoder = tokenizer()
    encoder.enable_truncation(most)
    assert answer["usage"]["total_tokens"] == sum(len(encoder.encode(QUERY, each).ids) for each in DOCUMENTS)


def runs(url: str, model: str) -> int:
    """How often a model has run."""
    text = httpx.get(url.replace("/v1/rerank", "/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("nv_inference_exec_count{") and f'"{model}"' in line]
    return sum(int(float(line.split()[-1])) for line in lines)


def test_many_documents_share_batches(url: str) -> None:
    """Pairs have six lengths, which the tokenizer fills up to two multiples of 8."""
    documents = [" ".join(WORDS[: 1 + index % len(WORDS)]) for index in range(200)]
    before = runs(url, "cross")
    results = rerank(url, documents=documents).json()["results"]
    assert runs(url, "cross") - before < 60
    expected = expected_scores(QUERY, documents)
    np.testing.assert_allclose(
        [each["relevance_score"] for each in results], [expected[each["index"]] for each in results], atol=1e-6
    )


def test_items_have_the_trace_of_their_request(
    url: str,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = running.plane
    submit, seen = plane.submit, []

    def watched(servable: Any, entry: Any, traceparent: str) -> Any:
        seen.append(traceparent)
        return submit(servable, entry, traceparent)

    monkeypatch.setattr(plane, "submit", watched)
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS[:2], "truncate_prompt_tokens": -1}
    assert httpx.post(url, json=body, headers=header).status_code == 200
    texts = {"model": "embedding", "input": ["iris", "wine", "petal"], "truncate_prompt_tokens": -1}
    assert httpx.post(url.replace("rerank", "embeddings"), json=texts, headers=header).status_code == 200
    assert seen == [*header.values()] * 5


@pytest.mark.parametrize("route", ["rerank", "embeddings"])
def test_a_quota_counts_tokens(
    url: str,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
) -> None:
    """The second request begins with one token left, and takes more; further ones are refused before anything runs."""
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "model": "reranker"}
    body = body if route == "rerank" else {"input": DOCUMENTS, "model": "embedding"}

    def sent() -> httpx.Response:
        return httpx.post(url.replace("rerank", route), json=body, timeout=60)

    tokens = sent().json()["usage"]["total_tokens"]
    burst = tokens + 1
    plane = running.plane
    monkeypatch.setattr(plane, "token_quotas", Quotas(Quota(0.01, burst), unit="tokens"))
    assert [sent().status_code for _ in range(2)] == [200, 200]
    before = runs(url, "cross")
    refused = sent()
    assert refused.status_code == 429 and runs(url, "cross") == before
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "quota_exceeded")
    assert error["message"] == f"the quota of 0.01 tokens per second and client, {burst} at once, is used up"
    assert (tokens - 2) * 100 <= int(refused.headers["retry-after"]) <= tokens * 100


def test_a_pipeline_without_an_output_for_tokens_counts_them(url: str, running: Running) -> None:
    folder = running.root.parent / "untold"
    folder.mkdir()
    (folder / "pipeline.toml").write_text(PIPELINE.replace('["score", "tokens"]', '["score"]'))
    tokenizer().save(str(folder / "tokenizer.json"))
    running.client.upload("untold", folder / "pipeline.toml")
    usage = rerank(url).json()["usage"]
    assert rerank(url, model="untold").json()["usage"] == usage != {"prompt_tokens": 0, "total_tokens": 0}


def test_pairs_of_different_lengths_share_packed_runs(url: str, running: Running) -> None:
    """Twelve lengths, which nothing fills up. Without packing, each run has pairs of one length, filled up to 16."""
    folder = running.root.parent / "packed"
    folder.mkdir()
    (folder / "cross.onnx").write_bytes(cross_encoder())
    text = PIPELINE.replace('"cross"', '"packed-cross"').replace(", multiple = 8", "")
    (folder / "pipeline.toml").write_text(text)
    tokenizer().save(str(folder / "tokenizer.json"))
    running.client.upload("packed-cross", folder / "cross.onnx")
    running.client.upload("packed", folder / "pipeline.toml")
    documents = [" ".join(WORDS[: 1 + index % 12]) for index in range(60)]
    expected = expected_scores(QUERY, documents)
    plane = running.plane

    def ranked() -> tuple[int, int]:
        """The numbers of runs, and of tokens in packed runs."""
        before, stats = runs(url, "packed-cross"), plane.resolve("packed-cross").stats
        packed = stats.packed_tokens
        answer = rerank(url, model="packed", documents=documents).json()
        found = [each["relevance_score"] for each in answer["results"]]
        np.testing.assert_allclose(found, [expected[each["index"]] for each in answer["results"]], atol=1e-6)
        return runs(url, "packed-cross") - before, stats.packed_tokens - packed

    lengths = [len(tokenizer().encode(QUERY, document).ids) for document in documents]
    count, tokens = ranked()
    assert count < 12 and tokens == sum(lengths)
    (running.root / "packed-cross" / "config.toml").write_text("[compile]\npacking = 0")
    until(lambda: ranked()[1] == 0)


def test_texts_of_several_requests_share_packed_runs_of_all_steps(url: str, running: Running) -> None:
    plane = running.plane
    pool = plane.resolve("embedding").batcher._own["pool"]  # not in the registry, so it has no metrics
    texts = [" ".join(WORDS[: 1 + index % 12]) for index in range(60)]
    alone = {text: embed_by_hand(text) for text in set(texts)}
    before, pools, tokens = runs(url, "encoder"), pool.stats.execution_count, pool.stats.packed_tokens

    def embedded(_: int) -> tuple[int, list[list[float]]]:
        body = {"model": "embedding", "input": texts}
        answer = httpx.post(url.replace("rerank", "embeddings"), json=body, timeout=60).json()
        return answer["usage"]["total_tokens"], [each["embedding"] for each in answer["data"]]

    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(embedded, range(4))]
    for _, found in answers:
        np.testing.assert_allclose(found, [alone[text] for text in texts], atol=1e-5)
    assert runs(url, "encoder") - before < 4 * 12
    assert pool.stats.execution_count - pools < 4 * 12
    assert pool.stats.packed_tokens - tokens == sum(count for count, _ in answers)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": []}, "documents: expected at least 1"),
        ({"documents": ["x"] * 2049}, "documents: expected at most 2048"),
        ({"documents": [3]}, "documents"),
        ({"top_n": 0}, "top_n: expected at least 1, got 0"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens: expected -1, or 3 to 24, got 2"),
        ({"truncate_prompt_tokens": 25}, "truncate_prompt_tokens: expected -1, or 3 to 24, got 25"),
        ({"query": "x" * 100_000}, "documents 0: step 'tokenize': text 0: expected at most 65536 bytes, got 100000"),
        ({"documents": ["x", "y" * 100_000]}, "documents 1: step 'tokenize': pair 0: expected at most 65536 bytes"),
        ({"model": "embedding"}, "such as a pipeline of tokenize_pair and a cross-encoder; 'embedding' has text"),
        ({"raw": True}, "raw"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_requests_are_refused(url: str, body: dict[str, Any], message: str) -> None:
    answer = rerank(url, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
