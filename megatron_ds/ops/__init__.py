"""The maths of a layer, without parallelism: a plain reference beside each fast path."""
