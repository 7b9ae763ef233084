import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** The lines that a program prints, and what its callbacks have put aside to be printed in one order. */
final class Lines {
    static final int PATIENCE_SECS = 60;

    private Lines() {}

    static void say(Object... words) {
        List<String> texts = new ArrayList<>();
        for (Object word : words) texts.add(String.valueOf(word));
        System.out.println(String.join(" ", texts));
    }

    static String text(byte[] octets) {
        return new String(octets, StandardCharsets.UTF_8);
    }

    static byte[] octets(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(ByteBuffer octets) {
        return StandardCharsets.UTF_8.decode(octets.duplicate()).toString();
    }

    /** What callbacks have heard. */
    static final class Inbox {
        private final BlockingQueue<String> heard = new LinkedBlockingQueue<>();

        void add(String one) {
            heard.add(one);
        }

        int size() {
            return heard.size();
        }

        /** So many, in the order they came. */
        List<String> inOrder(int count) throws InterruptedException {
            List<String> found = new ArrayList<>();
            while (found.size() < count) {
                String one = heard.poll(PATIENCE_SECS, TimeUnit.SECONDS);
                if (one == null) throw new IllegalStateException("heard only " + found);
                found.add(one);
            }
            return found;
        }

        /** So many, in the order of their texts. */
        List<String> sorted(int count) throws InterruptedException {
            List<String> found = inOrder(count);
            Collections.sort(found);
            return found;
        }
    }
}
