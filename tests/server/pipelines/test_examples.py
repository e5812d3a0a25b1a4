"""The example pipelines of docs/, on a server with the real compiler."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import httpx
import numpy as np
import onnxruntime
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image
from tokenizers import Tokenizer

from lathe.server.client import ApiError, Client
from tests.server.pipelines.example_server import EXAMPLES, PROJECT, Running
from tools.make_models import held_out
from tools.make_pipelines import NAMES, picture


@pytest.fixture
def client(running: Running) -> Client:
    return running.client


def address_of(running: Running, way: str) -> str:
    port = running.server.config.app.state.grpc.port if way == "grpc" else running.port
    return f"127.0.0.1:{port}"


def blobs(*contents: bytes) -> np.ndarray:
    array = np.empty((len(contents), 1), np.object_)
    array[:, 0] = contents
    return array


def test_an_image_goes_in_and_a_label_comes_out(client: Client) -> None:
    outputs = client.infer("digit", {"picture": blobs((EXAMPLES / "digit" / "seven.jpg").read_bytes())}).outputs
    assert outputs["name"][0, 0] == b"seven"
    assert outputs["score"].shape == (1, 3)
    assert (np.diff(outputs["score"][0]) <= 0).all()


def test_images_are_classified_about_as_well_as_the_models_own_data(client: Client) -> None:
    count = 60
    outputs = client.infer("digit", {"picture": blobs(*(picture(number) for number in range(count)))}).outputs
    right = [name.decode() == NAMES[label] for name, label in zip(outputs["name"][:, 0], held_out()[1], strict=False)]
    assert sum(right) / count > 0.9


def test_the_pipeline_computes_what_its_steps_compute_by_hand(client: Client) -> None:
    data = picture(3)
    grey = (
        np.asarray(Image.open(BytesIO(data)).convert("L").resize((8, 8), Image.Resampling.BOX), np.float32) * 16 / 255
    )
    digits = onnxruntime.InferenceSession(PROJECT / "model_repo/digits/2/model.onnx")
    (expected,) = digits.run(None, {"image": grey[None, None]})
    got = client.infer("digit", {"picture": blobs(data)}).outputs
    np.testing.assert_allclose(got["score"][0], np.sort(expected[0])[:-4:-1], rtol=1e-4, atol=1e-6)


def embed_by_hand(text: str) -> np.ndarray:
    return embed_tokens(Tokenizer.from_file(str(EXAMPLES / "embedding" / "tokenizer.json")).encode(text).ids)


def embed_tokens(ids: list[int]) -> np.ndarray:
    encoder = onnxruntime.InferenceSession(EXAMPLES / "embedding" / "encoder.onnx")
    mean = encoder.run(None, {"input_ids": np.array([ids], np.int64)})[0][0].mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean))


TEXTS = ("sepal width of the iris plant", "the length of a flower's petals " * 9, "alcohol in italian wines")


def test_texts_go_in_and_embeddings_come_out(client: Client) -> None:
    together = client.infer("embedding", {"text": blobs(*(text.encode() for text in TEXTS))}).outputs["embedding"]
    alone = [client.infer("embedding", {"text": blobs(text.encode())}).outputs["embedding"][0] for text in TEXTS]
    np.testing.assert_allclose(together, alone, atol=1e-5)  # padding makes no difference
    np.testing.assert_allclose(together, [embed_by_hand(text) for text in TEXTS], atol=1e-5)
    flowers, petals, wine = together
    assert flowers @ petals > flowers @ wine + 0.2


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_nvidias_client_sees_an_ordinary_model(running: Running, way: str) -> None:
    module = triton_http if way == "http" else triton_grpc
    with module.InferenceServerClient(address_of(running, way)) as client:
        more = {} if way == "http" else {"as_json": True}
        config = client.get_model_config("digit", **more)
        config = config.get("config", config)
        assert config["platform"] == "lathe_pipeline"
        assert config["input"] == [{"name": "picture", "data_type": "TYPE_STRING", "dims": config["input"][0]["dims"]}]
        assert client.get_model_metadata("digit", **more)["inputs"][0]["datatype"] == "BYTES"
        tensor = module.InferInput("picture", [1, 1], "BYTES")
        tensor.set_data_from_numpy(blobs((EXAMPLES / "digit" / "seven.jpg").read_bytes()))
        assert client.infer("digit", [tensor]).as_numpy("name")[0, 0] == b"seven"
        (stats,) = client.get_inference_statistics("digit", **more)["model_stats"]
        assert int(stats["inference_count"]) > 0


def test_a_row_that_is_no_image_is_the_clients_error(client: Client) -> None:
    with pytest.raises(ApiError, match=r"step 'decode': image 1: expected one of JPEG") as raised:
        client.infer("digit", {"picture": blobs(picture(0), b"GIF89a nonsense")})
    assert raised.value.status == 400


def test_each_step_is_measured(client: Client) -> None:
    client.infer("digit", {"picture": blobs(picture(0))})
    for step in ("decode", "scale", "classify", "name"):
        assert f'lathe_step_seconds_count{{model="digit",step="{step}",version="1"}}' in client.metrics()


def embeddings(running: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{running.port}/v1/embeddings", json={"model": "embedding", **body}, timeout=60)


def test_openais_clients_get_embeddings(running: Running) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="any") as sdk:  # asks for base64
        answer = sdk.embeddings.create(model="embedding", input=list(TEXTS))
    assert [each.index for each in answer.data] == [0, 1, 2]
    expected = [embed_by_hand(text) for text in TEXTS]
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-5)
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "embedding" / "tokenizer.json"))
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in TEXTS)


def test_texts_are_truncated_to_as_many_tokens_as_asked(running: Running) -> None:
    """The first tokens stay, as for vLLM's pooling models."""
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "embedding" / "tokenizer.json"))
    tokenizer.enable_truncation(5)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="any") as sdk:
        create, body = sdk.embeddings.create, {"truncate_prompt_tokens": 5}
        answer = create(model="embedding", input=list(TEXTS), extra_body=body)
        assert create(model="embedding", input=TEXTS[1]).data[0].embedding != answer.data[1].embedding
    expected = [embed_tokens(tokenizer.encode(text).ids) for text in TEXTS]
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-5)
    assert answer.usage.total_tokens == sum(len(tokenizer.encode(text).ids) for text in TEXTS)


@pytest.mark.parametrize("most", [0, -2, 129, 1 << 70, 1.5, "5", True, []])
def test_bad_numbers_of_tokens_are_refused(running: Running, most: object) -> None:
    answer = embeddings(running, input="x", truncate_prompt_tokens=most)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "expected" in error["message"], error


def test_a_model_without_tokens_truncates_nothing(running: Running) -> None:
    answer = embeddings(running, model="digit", input="iris", truncate_prompt_tokens=5)
    message = "truncate_prompt_tokens: expected -1, got 5: no step of 'digit' makes tokens of texts"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_embeddings_of_many_texts_keep_their_order(running: Running) -> None:
    texts = [f"{word} " * (1 + number % 9) for number, word in enumerate(["iris", "wine", "petal"] * 67)]
    found = embeddings(running, input=texts).json()["data"]
    expected = {text: embed_by_hand(text) for text in set(texts)}
    np.testing.assert_allclose([each["embedding"] for each in found], [expected[text] for text in texts], atol=1e-5)


def test_shorter_embeddings_have_length_one(running: Running) -> None:
    (whole,) = embeddings(running, input=TEXTS[0]).json()["data"]
    (part,) = embeddings(running, input=TEXTS[0], dimensions=4).json()["data"]
    begin = np.array(whole["embedding"][:4])
    np.testing.assert_allclose(part["embedding"], begin / np.linalg.norm(begin), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "body.input: expected at least 1 elements, got []"),
        ({"input": ["x"] * 2049}, "body.input: expected at most 2048 elements"),
        ({"input": [1, 2, 3]}, "body.input.0: expected a text, got 1"),
        ({"input": "x", "dimensions": 100_000}, "dimensions: expected at most"),
        ({"input": ["x", "y" * 100_000]}, "input 1: step 'tokenize': text 0: expected at most 65536 bytes, got 100000"),
        ({"input": "x", "model": "digits"}, "model: expected one that makes an output FP32 [n, d]"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_bad_requests_for_embeddings_are_refused(running: Running, body: dict[str, Any], message: str) -> None:
    answer = embeddings(running, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
