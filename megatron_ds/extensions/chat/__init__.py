"""From conversations to tokens and loss masks: formats, chat templates, the place of the answers."""
