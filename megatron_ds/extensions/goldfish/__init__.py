"""Goldfish loss: some tokens never count, chosen by the tokens before them, so that texts are not learned by heart."""
