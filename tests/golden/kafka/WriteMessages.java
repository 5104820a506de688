// Prints every message of Kafka's protocol that sparklog knows, in every version, as kafka-clients writes it.
//
//   javac -cp kafka-clients-4.1.1.jar:slf4j-api-1.7.36.jar WriteMessages.java
//   java -cp kafka-clients-4.1.1.jar:slf4j-api-1.7.36.jar:. WriteMessages 0,1,2,3 | gzip -9n > messages.jsonl.gz
//
// The argument is the numbers of the APIs. Each line is one frame without its length: API key, version, "request" or
// "response", the bytes in hexadecimal, and the values of the fields. Bytes and ids are hexadecimal there. The variant
// "full" sets every field, and "null" sets what may be null to null and what has a default to that default.

import java.lang.reflect.Field;
import java.lang.reflect.ParameterizedType;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.message.ResponseHeaderData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.protocol.ObjectSerializationCache;
import org.apache.kafka.common.protocol.types.BoundField;
import org.apache.kafka.common.protocol.types.Schema;
import org.apache.kafka.common.protocol.types.TaggedFields;
import org.apache.kafka.common.protocol.types.Type;
import org.apache.kafka.common.record.BaseRecords;
import org.apache.kafka.common.record.MemoryRecords;

public class WriteMessages {
    private static int counter;
    private static boolean full;

    public static void main(String[] arguments) throws Exception {
        for (String number : arguments[0].split(",")) {
            ApiMessageType type = ApiKeys.forId(Integer.parseInt(number)).messageType;
            for (short v = type.lowestSupportedVersion(); v <= type.highestSupportedVersion(false); v++) {
                for (boolean variant : new boolean[] {true, false}) {
                    full = variant;
                    counter = 1000 * v;
                    RequestHeaderData header = new RequestHeaderData()
                        .setRequestApiKey(type.apiKey()).setRequestApiVersion(v)
                        .setCorrelationId(counter).setClientId(full ? "client" : null);
                    ApiMessage request = type.newRequest();
                    String values = fill(request, type.requestSchemas()[v]);
                    print(type, v, "request", write(header, type.requestHeaderVersion(v), request, v), values);
                    ApiMessage response = type.newResponse();
                    values = fill(response, type.responseSchemas()[v]);
                    ResponseHeaderData answer = new ResponseHeaderData().setCorrelationId(1000 * v);
                    print(type, v, "response", write(answer, type.responseHeaderVersion(v), response, v), values);
                }
            }
        }
    }

    private static void print(ApiMessageType type, short version, String kind, String bytes, String values) {
        System.out.printf(
            "{\"key\":%d,\"version\":%d,\"kind\":\"%s\",\"variant\":\"%s\",\"bytes\":\"%s\",\"values\":%s}%n",
            type.apiKey(), version, kind, full ? "full" : "null", bytes, values);
    }

    private static String write(Message header, short headerVersion, Message message, short version) {
        ObjectSerializationCache cache = new ObjectSerializationCache();
        int size = header.size(cache, headerVersion) + message.size(cache, version);
        ByteBuffer buffer = ByteBuffer.allocate(size);
        ByteBufferAccessor writable = new ByteBufferAccessor(buffer);
        header.write(writable, cache, headerVersion);
        message.write(writable, cache, version);
        return hex(buffer.array());
    }

    private static String hex(byte[] bytes) {
        StringBuilder text = new StringBuilder();
        for (byte one : bytes) text.append(String.format("%02x", one));
        return text.toString();
    }

    /** Sets the fields of a message that a version has, and returns their values as JSON. */
    private static String fill(Object message, Schema schema) throws Exception {
        StringBuilder json = new StringBuilder("{");
        for (BoundField field : schema.fields()) {
            if (field.def.type instanceof TaggedFields) {
                for (Map.Entry<Integer, org.apache.kafka.common.protocol.types.Field> tagged
                        : ((TaggedFields) field.def.type).fields().entrySet()) {
                    if (full) set(message, tagged.getValue().name, tagged.getValue().type, json);
                }
            } else {
                set(message, field.def.name, field.def.type, json);
            }
        }
        return json.append("}").toString();
    }

    private static void set(Object message, String name, Type type, StringBuilder json) throws Exception {
        StringBuilder camel = new StringBuilder();
        for (String word : name.split("_")) {
            camel.append(camel.length() == 0 ? word : Character.toUpperCase(word.charAt(0)) + word.substring(1));
        }
        Field field = message.getClass().getDeclaredField(camel.toString());
        field.setAccessible(true);
        StringBuilder value = new StringBuilder();
        field.set(message, make(message, field, name, type, value));
        json.append(json.length() == 1 ? "" : ",").append("\"").append(name).append("\":").append(value);
    }

    private static Object make(Object message, Field field, String name, Type type, StringBuilder json)
            throws Exception {
        // The schema does not say whether a struct may be null, but its default does.
        boolean nullable = type instanceof Schema ? field.get(message) == null : type.isNullable();
        if (!full && nullable) {
            json.append("null");
            return null;
        }
        if (type instanceof Schema) {
            Object struct = field.getType().getDeclaredConstructor().newInstance();
            json.append(fill(struct, (Schema) type));
            return struct;
        }
        if (type.isArray()) return makeArray(field, name, type, json);
        if (field.getType() == BaseRecords.class) {
            byte[] bytes = bytes(full ? 700 : 20);
            json.append("\"").append(hex(bytes)).append("\"");
            return MemoryRecords.readableRecords(ByteBuffer.wrap(bytes));
        }
        return makePrimitive(field.getType(), name, json);
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    private static Object makeArray(Field field, String name, Type type, StringBuilder json) throws Exception {
        Type element = type.arrayElementType().get();
        boolean plain = field.getType() == List.class;
        Collection all = plain ? new ArrayList() : (Collection) field.getType().getDeclaredConstructor().newInstance();
        java.lang.reflect.Type generic = plain ? field.getGenericType() : field.getType().getGenericSuperclass();
        Class<?> of = (Class<?>) ((ParameterizedType) generic).getActualTypeArguments()[0];
        json.append("[");
        for (int i = 0; i < (full ? 2 : 1); i++) {
            json.append(i == 0 ? "" : ",");
            if (element instanceof Schema) {
                Object struct = of.getDeclaredConstructor().newInstance();
                json.append(fill(struct, (Schema) element));
                all.add(struct);
            } else {
                all.add(makePrimitive(of, name, json));
            }
        }
        json.append("]");
        return all;
    }

    private static byte[] bytes(int size) {
        byte[] bytes = new byte[size];
        for (int i = 0; i < size; i++) bytes[i] = (byte) (counter + 3 * i);
        counter++;
        return bytes;
    }

    private static Object makePrimitive(Class<?> of, String name, StringBuilder json) {
        int number = counter++;
        Object value;
        if (of == String.class) {
            // Some texts have more than 127 bytes, or characters of several bytes.
            value = name + "é" + number + (number % 11 == 0 ? "-".repeat(130) : "");
            json.append("\"").append(value).append("\"");
            return value;
        }
        if (of == byte[].class || of == ByteBuffer.class) {
            byte[] bytes = bytes(number % 5 * 40);
            json.append("\"").append(hex(bytes)).append("\"");
            return of == byte[].class ? bytes : ByteBuffer.wrap(bytes);
        }
        if (of == Uuid.class) {
            Uuid id = new Uuid(number * 0x1234567890ABCDL, -number);
            json.append("\"").append(String.format("%016x%016x", number * 0x1234567890ABCDL, (long) -number)).append("\"");
            return id;
        }
        if (of == boolean.class) value = full;
        else if (of == byte.class || of == Byte.class) value = (byte) (number % 2 == 0 ? number : -number);
        else if (of == short.class || of == Short.class) value = (short) (number % 2 == 0 ? number : -number);
        else if (of == int.class || of == Integer.class) value = number * 100003 * (number % 2 == 0 ? 1 : -1);
        else if (of == long.class || of == Long.class) value = number * 10000000019L * (number % 2 == 0 ? 1 : -1);
        else if (of == double.class) value = number / 8.0;
        else throw new IllegalStateException(name + " is a " + of);
        json.append(value);
        return value;
    }
}
