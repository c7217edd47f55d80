"""Programming languages of judged programs: how each is found in a text, compiled and started."""
