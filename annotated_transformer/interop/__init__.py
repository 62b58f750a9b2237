"""Trained systems for other programs: CTranslate2, Hugging Face and ONNX. Written by hand."""
