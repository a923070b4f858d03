"""Trained models at work: translation, evaluation, scores, the attention page."""
