"""Paths of the built-in task's problems, teacher and student, which ship in the package. `stillhouse builtin build`
rebuilds them. Imports no torch.
"""

from pathlib import Path

DATA_DIR = Path(__file__).resolve().parent / "data"
TEACHER_DIR = DATA_DIR / "teacher"
"""Hugging Face folder of the teacher: sampled accuracy about 0.97."""
STUDENT_DIR = DATA_DIR / "student"
"""Hugging Face folder of the student that runs start from: sampled accuracy about 0.28."""
TRAIN_JSONL = DATA_DIR / "train.jsonl"
"""8,192 problems, one JSON object per line: prompt (text of the user's turn), ground_truth, tag."""
EVAL_JSONL = DATA_DIR / "eval.jsonl"
"""256 problems of the same kind. None is in TRAIN_JSONL, and neither model was trained on them."""
CALCULATOR_TRAIN_JSONL = DATA_DIR / "calculator_train.jsonl"
"""2,048 problems for the environment `calculator`, in the same format."""
CALCULATOR_EVAL_JSONL = DATA_DIR / "calculator_eval.jsonl"
"""256 more, which are in no training data."""
