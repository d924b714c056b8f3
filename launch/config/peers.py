"""Names of settings in other trainers, and our key for each. docs/coming-from.md has the same table and explains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NAMES: Final = {
    "learner.lr": "learning_rate",
    "learner.schedule": "lr_scheduler_type lr_decay_style warmup_style",
    "learner.warmup_steps": (
        "warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio lr_warmup_iters lr_warmup_fraction"
    ),
    "learner.betas": "adam_beta1 adam_beta2",
    "learner.eps": "adam_epsilon",
    "learner.optimizer": "optim optimizer",
    "learner.max_grad_norm": "clip_grad grad_clip",
    "steps": "max_steps num_rollout total_training_steps num_train_epochs total_epochs",
    "buffer.batch_rollouts": (
        "batch_size train_batch_size per_device_train_batch_size generation_batch_size rollout_batch_size "
        "global_batch_size"
    ),
    "learner.pack_tokens": (
        "gradient_accumulation_steps ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu"
    ),
    "learner.updates_per_batch": "num_iterations ppo_epochs steps_per_generation num_steps_per_rollout",
    "learner.tasks.group_size": (
        "num_generations num_generations_per_prompt n_samples_per_prompt num_return_sequences_in_group"
    ),
    "learner.tasks.max_new_tokens": (
        "max_completion_length max_response_length rollout_max_response_len max_new_tokens response_length"
    ),
    "learner.tasks.max_prompt_tokens": "max_prompt_length prompt_length rollout_max_prompt_len",
    "learner.tasks.temperature": "rollout_temperature",
    "learner.tasks.top_p": "rollout_top_p",
    "learner.tasks.top_k": "rollout_top_k",
    "learner.objective.cost_discount": "kl_discount_factor",
    "actor.engine": "use_vllm",
    "actor.server.tp": "vllm_tensor_parallel_size tensor_model_parallel_size rollout_num_gpus_per_engine",
    "actor.server.args": "gpu_memory_utilization vllm_gpu_memory_utilization sglang_mem_fraction_static enforce_eager",
    "actor.torch.max_context": "max_model_len vllm_max_model_length max_length rollout_max_context_len",
    "actor.environments.single_turn.options.reward": "reward_funcs custom_rm_path rm_type reward_manager",
    "actor.max_concurrent_rollouts": "max_num_seqs sglang_server_concurrency",
    "--run-dir": "output_dir default_local_dir",
    "--name": "run_name experiment_name",
    "models.student": "model_name_or_path hf_checkpoint",
    "models.teacher": "teacher_model_name_or_path opd_teacher_load",
    "teacher.api.url": "teacher_model_server_url",
    "teacher.engine": "opd_type",
    "learner.tasks.prompts": "train_files prompt_data dataset_name train_dataset",
    "learner.tasks.eval_prompts": "val_files eval_prompt_data eval_dataset",
    "learner.tasks.shuffle": "shuffle_dataset rollout_shuffle",
    "learner.tasks.eval_samples": "n_samples_per_eval_prompt",
    "learner.tasks.columns": "input_key prompt_key label_key",
    "learner.eval_every": "eval_steps test_freq eval_interval",
    "learner.checkpoint_every": "save_steps save_freq save_interval",
    "learner.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep",
    "learner.trackers": "report_to use_wandb logger",
    "learner.dtype": "bf16 torch_dtype",
    "learner.recompute": "gradient_checkpointing",
    "learner.lora.rank": "lora_r lora_rank",
    "learner.lora.alpha": "lora_alpha",
    "learner.lora.targets": "lora_target_modules target_modules",
    "learner.lora.quantize": "load_in_4bit",
    "learner.offline.student_fraction": "lmbda",
    "learner.offline.divergence": "seq_kd",
    "learner.objective.divergence": "kl_loss_type",
    "learner.objective.coef": "beta kl_coef kl_loss_coef kl_penalty_coef opd_kl_coef distill_loss_weight",
    "learner.objective.entropy_coef": "entropy_coeff",
    "learner.objective.aggregation": "loss_type loss_agg_mode",
    "learner.objective.advantage": "advantage_estimator adv_estimator scale_rewards norm_adv_by_std_in_grpo",
    "learner.objective.importance.low": "epsilon eps_clip clip_ratio_low",
    "learner.objective.importance.high": "epsilon_high eps_clip_high clip_ratio_high",
    "learner.objective.importance.dual": "clip_ratio_c delta",
    "learner.objective.importance": "importance_sampling_level vllm_importance_sampling_mode",
    "learner.objective.importance.cap": "tis_clip vllm_importance_sampling_clip_max",
    "buffer.max_staleness": "max_head_offpolicyness max_off_policy_steps max_steps_off_policy",
    "buffer.dynamic_sampling": "use_dynamic_sampling filter_groups dynamic_sampling_filter_path",
    "buffer.mask_truncated": "mask_truncated_completions overlong_filtering",
    "learner.routing_replay": "use_rollout_routing_replay enable_rollout_routing_replay enable_router_replay",
    "learner.min_lr_ratio": "min_lr",
    "learner.ema.decay": "sync_ref_model",
    "--resume": "resume_from_checkpoint resume_mode",
    "seed": "data_seed",
}
"""Our key -> their names."""
PEERS: Final[Mapping[str, str]] = {name: ours for ours, names in _NAMES.items() for name in names.split()}
"""Their name -> our key."""
