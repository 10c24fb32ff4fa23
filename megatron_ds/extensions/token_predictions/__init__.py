"""Several predicted tokens: further depths behind the head of a GPT, each of which predicts one token later."""
