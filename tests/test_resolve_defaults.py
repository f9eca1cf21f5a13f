"""What a request leaves out is filled in from the card, and what it does not need is left out."""

from schemas.resolve import StepLists, num_rows, resolve
from tests.cards import ltx23_card
from tests.resolving import CARD, problem_of, resolved_of


def test_a_bare_prompt_gets_the_cards_defaults() -> None:
    resolved = resolve({"prompt": "  a cat\n"}, CARD)
    assert resolved.model_dump(exclude={"seed", "request_id"}) == {
        "prompt": "a cat",
        "negative_prompt": None,
        "mode": "rollout",
        "num_samples": 1,
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "frame_rate": 24.0,
        "num_inference_steps": 6,
        "sigmas": None,
        "sigma_shift": "constant",
        "guidance": {"video": 1.0, "audio": 1.0},
        "guider": None,
        "transition": {
            "video": {"kind": "sde", "noise_level": 0.7, "log_prob_kind": "density"},
            "audio": {"kind": "sde", "noise_level": 0.7, "log_prob_kind": "density"},
        },
        "stochastic_steps": {"video": (0, 1, 2, 3, 4, 5), "audio": (0, 1, 2, 3, 4, 5)},
        "shared_initial_noise": False,
        "shared_prefix": False,
        "return_steps": (0, 1, 2, 3, 4, 5, 6),
        "state_dtype": "float32",
        "trajectory": True,
        "media": True,
        "min_policy_version": 0,
        "allow_mixed_versions": False,
        "metadata": None,
        "deadline_s": 600.0,
    }


def test_the_seed_and_the_request_id_are_drawn_anew_where_none_is_given() -> None:
    first, second = resolved_of(), resolved_of()
    assert first.seed != second.seed
    assert first.request_id != second.request_id
    assert 0 <= first.seed < 2**31
    assert resolved_of(seed=0).seed == 0


def test_generate_resolves_to_diffusers_defaults() -> None:
    resolved = resolved_of(mode="generate")
    assert resolved.guider is not None
    assert resolved.guider.model_dump() == {
        "guidance_scale": 3.0,
        "stg_scale": 1.0,
        "modality_scale": 3.0,
        "guidance_rescale": 0.7,
        "audio_guidance_scale": 7.0,
        "audio_stg_scale": 1.0,
        "audio_modality_scale": 3.0,
        "audio_guidance_rescale": 0.7,
        "spatio_temporal_guidance_blocks": (28,),
    }
    assert resolved.sigma_shift == "tokens"
    assert (resolved.transition.video.kind, resolved.transition.audio.kind) == ("ode", "ode")
    assert resolved.stochastic_steps == StepLists(video=(), audio=())
    assert resolved.return_steps == (6,)
    assert resolved.negative_prompt == ""
    assert num_rows(resolved) == 2


def test_an_audio_value_of_0_or_none_means_the_videos() -> None:
    guider = {"guidance_scale": 2.0, "audio_guidance_scale": 0, "stg_scale": 0.5, "audio_stg_scale": None}
    resolved = resolved_of(mode="generate", guider=guider)
    assert resolved.guider is not None
    assert (resolved.guider.audio_guidance_scale, resolved.guider.audio_stg_scale) == (2.0, 0.5)


def test_a_small_checkpoint_perturbs_its_last_block() -> None:
    resolved = resolve({"prompt": "a", "mode": "generate"}, ltx23_card(num_layers=2))
    assert resolved.guider is not None
    assert resolved.guider.spatio_temporal_guidance_blocks == (1,)


def test_a_negative_prompt_is_there_exactly_where_guidance_needs_it() -> None:
    assert resolved_of().negative_prompt is None
    assert resolved_of(guidance={"audio": 3.0}).negative_prompt == ""
    assert resolved_of(guidance={"video": 3.0}, negative_prompt=" blurry ").negative_prompt == "blurry"
    off = {"guidance_scale": 1.0, "audio_guidance_scale": None}
    assert resolved_of(mode="generate", guider=off).negative_prompt is None
    assert problem_of(negative_prompt="blurry").remedy == "set guidance above 1 or leave negative_prompt out"
